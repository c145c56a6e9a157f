"""The vectors of conformance/ are the recurrences', and the library's algorithms pass.

Those that are driven together share a compiled program.
"""

import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import joint_strategies
from support.chosen_tests import chosen_values, split_around
from support.commands import ROOT
from support.plain_loop import local_steps
from support.problems import SHAPES, flatten
from support.tiers import tiers

import syncalgos
from conformance import check as checker
from conformance.check import check, read
from conformance.make import (
    FOLDER,
    describe_draws,
    fill_needs,
    format_file,
    list_files,
    vectors,
)
from syncalgos import Replica

FILES = list_files()
AXIS = "worker"
LAST_DIGIT = 1.1e-10  # of ten; sums in another order round otherwise
TOGETHER = 8
# One of each kind of file: only gradients, a schedule, a graph, draws that are the same
# on all workers or not, a clock, another inner optimizer.
KINDS = "bmuf", "slowmo", "gossip", "sparta", "push_sum", "heloco", "des_loc"


def make_argument(value: Any) -> Any:
    """A value of a file as a factory takes it: weights, or rates of the steps."""
    if not isinstance(value, list):
        return value
    numbers = np.array(value)
    return numbers if numbers.ndim > 1 else lambda step: jnp.asarray(numbers)[step]


def make_pair(
    file: dict[str, Any],
) -> tuple[syncalgos.Strategy, optax.GradientTransformation]:
    """The strategy and the inner optimizer that a file asks for, from it alone."""
    settings = {
        name: make_argument(row["value"])
        for name, row in file["hyperparameters"].items()
    }
    optimizer_settings = {
        name: make_argument(value)
        for name, value in file["inner_optimizer"].items()
        if name != "name"
    }
    strategy = syncalgos.ALGORITHMS[file["algorithm"]](**settings, axis=AXIS)
    make_optimizer = optax.sgd if "momentum" in optimizer_settings else optax.adam
    return strategy, make_optimizer(**optimizer_settings)


def split_leaves(vectors: np.ndarray) -> dict[str, jax.Array]:
    """Cuts the last axis of vectors into the leaves of SHAPES."""
    stops = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])
    parts = zip(SHAPES.items(), np.split(vectors, stops[:-1], -1), strict=True)
    return {x: jnp.reshape(y, (*y.shape[:-1], *shape)) for (x, shape), y in parts}


@cache
def count_workers(name: str) -> int:
    return read(name)["workers"]


class TrainedFile(NamedTuple):
    """What the library makes of a file's gradients, (steps, workers, size) both."""

    replicas: np.ndarray
    centers: np.ndarray


@cache
def train_files(*names: str) -> dict[str, TrainedFile]:
    files = {name: read(name) for name in names}
    strategies = {}
    optimizers = {}
    for name, file in files.items():
        strategies[name], optimizers[name] = make_pair(file)
    strategy = joint_strategies.strategies(strategies)
    optimizer = joint_strategies.optimizers(optimizers)
    params = {
        name: split_leaves(np.array(file["start"])) for name, file in files.items()
    }

    def take_gradients(params: Any, step_gradients: Any) -> Any:
        return step_gradients

    def worker(gradients: Any) -> tuple[Any, Any]:
        start = Replica(params, optimizer.init(params)), strategy.init(params)
        replica, center = local_steps(
            strategy, optimizer, take_gradients, start, gradients
        )
        return replica.params, center

    def read_gradients(file: dict[str, Any]) -> dict[str, jax.Array]:
        gradients = np.array([step["gradients"] for step in file["steps"]])
        return split_leaves(gradients.swapaxes(0, 1))  # (workers, steps, …)

    def flatten_by_step(tree: Any) -> np.ndarray:
        return flatten(tree, lead=2).swapaxes(0, 1)

    gradients = {name: read_gradients(file) for name, file in files.items()}
    replicas, centers = jax.jit(jax.vmap(worker, axis_name=AXIS))(gradients)
    return {
        name: TrainedFile(
            replicas=flatten_by_step(replicas[name]),
            centers=flatten_by_step(centers[name]),
        )
        for name in names
    }


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", tiers(FILES, KINDS))
def test_our_algorithms_pass(name, request):
    chosen = chosen_values(request, "name")
    alike = [x for x in chosen if count_workers(x) == count_workers(name)]
    names = split_around(name, alike, TOGETHER)
    replicas, centers = train_files(*names)[name]
    rows = iter(replicas)
    means = iter(centers.mean(1))
    # The center of fedavg within a round is the engine's.
    center = None if name == "fedavg" else lambda: next(means)
    check(read(name), lambda gradients: next(rows), center=center)


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_what_the_command_makes(file):
    assert (FOLDER / f"{file}.json").exists(), "make vectors"
    made_vectors = vectors(file)
    stored = read(file)
    assert (FOLDER / f"{file}.json").read_text("utf-8") == format_file(stored)
    made_rows = made_vectors["steps"] + made_vectors.get("drawn", [])
    stored_rows = stored["steps"] + stored.get("drawn", [])
    for made_row, stored_row in zip(made_rows, stored_rows, strict=True):
        for key in {"params", "center", "draw"} & {*made_row}:
            np.testing.assert_allclose(
                made_row.pop(key), stored_row.pop(key), 0, LAST_DIGIT
            )
    assert made_vectors == stored, "make vectors"


def test_draws_that_a_recurrence_does_not_describe_are_an_error():
    recurrence = ModuleType("recurrences.mine")
    with pytest.raises(ValueError, match=r"recurrences\.mine draws .*: set its DRAWS"):
        describe_draws(recurrence)


def test_the_folder_has_no_other_files():
    assert {x.stem for x in FOLDER.glob("*.json")} == {*FILES}


def test_the_guide_for_implementers_names_files_that_exist_and_all_further_settings():
    guide = (FOLDER / "README.md").read_text("utf-8")
    sections = guide.partition("## By algorithm\n")[2]
    first_cells = re.findall(r"^\| (`.+?) \|", sections, re.MULTILINE)
    file_names = {*re.findall(r"`(.+?)`", " ".join(first_cells))}
    assert file_names <= {*FILES}
    assert {name for name in FILES if "." in name} <= file_names


PAGE = (ROOT / "docs" / "conformance.md").read_text("utf-8")
SMALL = json.loads(PAGE.partition("```json\n")[2].partition("```")[0])
END = [-0.725, -0.95]
ROW = [END] * 2


@pytest.mark.parametrize(
    ("second_params", "center", "message_part"),
    [
        (ROW, END, ""),
        (
            [END, [-0.725, 0.05]],
            END,
            "small: params after step 1 of worker 1 differ by 1: entry 1 is "
            "0.05, not -0.95 (tolerance 1e-09)",
        ),
        ([[np.nan, 0], [0, 0]], END, "of worker 0 differ by nan"),
        (ROW[:1], END, "params after step 1: (1, 2), not (2, 2)"),
        (ROW, [0, -0.95], "small: center after step 1 differ by 0.725"),
    ],
)
def test_the_checker_says_what_differs_first(second_params, center, message_part):
    steps = iter([[[-0.5, 0], [0, -1]], second_params])
    message = ""
    centers = iter([[-0.25, -0.5], center])
    try:
        check(SMALL, lambda gradients: next(steps), center=lambda: next(centers))
    except AssertionError as error:
        message = str(error)
    assert bool(message) == bool(message_part)
    assert message_part in message
    assert "\n" not in message


def test_the_file_that_the_page_shows_has_all_that_files_have():
    assert [*SMALL] == [*read("model_averaging")]
    assert SMALL["steps"][0].keys() == read("model_averaging")["steps"][0].keys()


def test_the_checker_needs_numpy_alone():
    source = Path(checker.__file__).read_text("utf-8")
    names = re.findall(r"^(?:import|from) ([\w.]+)", source, re.MULTILINE)
    assert {*names} == {"json", "collections.abc", "pathlib", "typing", "numpy"}


@pytest.mark.parametrize("need", ["leaves", "draws", "clock"])
def test_the_page_names_the_files_that_need_more(need):
    *_, cell = re.findall(rf"^\| `{need}` \| (.+?) \|", PAGE, re.MULTILINE)
    file_names = {x for x in FILES if need in read(x)["needs"]}
    assert {*re.findall(r"`([\w.]+)`", cell)} == file_names


def test_the_page_tells_the_number_of_files_without_needs():
    [number] = re.findall(r"^\| nothing \| the (\d+) ", PAGE, re.MULTILINE)
    assert int(number) == sum(not read(x)["needs"] for x in FILES)


def test_the_command_writes_the_files_of_each_need():
    page = fill_needs(
        PAGE, {"b": ["leaves", "draws"], "a": ["draws"], "c": [], "d": []}
    )
    section = page.partition("## What a file can test\n")[2]
    assert "| nothing | the 2 that are" in section
    assert "| `leaves` | `b` | the algorithm acts on each tensor" in section
    assert "| `draws` | `a`, `b` | the algorithm draws" in section
    assert "| `leaves` | names and shapes of the model's tensors" in page
    files = {x: read(x)["needs"] for x in FILES}
    assert fill_needs(page, files) == PAGE, "make vectors"
