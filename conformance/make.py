"""Writes the vectors of this folder from tests/recurrences: `make vectors`.

The recurrences compute gradients from params. Here each gradient is rounded to five
decimals before it is used, and so are uniform draws to six, so that files hold in few
digits exactly what the recurrence took. docs/conformance.md describes the files.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import numpy as np
import recurrences
from pages.docstrings import joined, parsed
from recurrences import LR, MOMENTUM, START, STEPS, des_loc, noloco, rate
from support.problems import SHAPES

import syncalgos

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "conformance.md"
NEEDS = "leaves", "draws", "clock"
WORKERS = 4
DECIMALS = 10  # of params


class VectorCase(NamedTuple):
    """A recurrence and the settings to run it under."""

    recurrence: Callable[..., Iterator[Any]]
    settings: dict[str, Any]
    departures: dict[str, Any]
    workers: int = WORKERS


def list_files() -> list[str]:
    """Returns the names of all files: of each algorithm, and of its VARIANTS."""
    names = []
    for algorithm in syncalgos.ALGORITHMS:
        module = import_module(f"recurrences.{algorithm}")
        names.append(algorithm)
        variants = getattr(module, "VARIANTS", {})
        names.extend(f"{algorithm}.{variant}" for variant in variants)
    return names


def choose_case(name: str) -> VectorCase:
    """Returns the settings of a file: the first, in which all terms are alive.

    Those of sync_sgd are those of quantized_sgd, so the plain mean takes their place;
    those of des_loc have second moments only under Adam. A name with a dot is one of an
    algorithm's VARIANTS, which may name another number of workers.
    """
    if name == "des_loc":
        return VectorCase(des_loc.adam_recurrence, des_loc.ADAM_SETTINGS[-1], {})
    algorithm, _, variant = name.partition(".")
    module = import_module(f"recurrences.{algorithm}")
    if variant:
        entry = module.VARIANTS[variant]
    else:
        entry = module.SETTINGS[1 if name == "sync_sgd" else 0]
    settings, departures = entry if isinstance(entry, tuple) else (entry, {})
    workers = departures.get("workers", WORKERS)
    other_departures = {
        name: value for name, value in departures.items() if name != "workers"
    }
    return VectorCase(module.recurrence, settings, other_departures, workers)


def vectors(name: str) -> dict[str, Any]:
    """Returns what a file holds, as docs/conformance.md describes it."""
    case = choose_case(name)
    algorithm = name.partition(".")[0]
    factory = syncalgos.ALGORITHMS[algorithm]
    module = import_module(f"recurrences.{algorithm}")
    with jax.enable_x64(True), record_state() as records:
        path = []
        steps = case.recurrence(case.workers, **case.settings, **case.departures)
        for center, params in steps:
            path.append((center, list(params)))
    draws = records.draws
    if name == "noloco":
        matchings = noloco.matchings(WORKERS, case.settings["seed"])
        draws = {numbers: list(matchings[pair]) for numbers, pair in draws.items()}
    doc = parsed(factory)
    parameters = inspect.signature(case.recurrence).parameters
    values = {name: parameter.default for name, parameter in parameters.items()}
    values |= case.settings
    needs = {
        "leaves": bool(records.cut_vectors) or getattr(module, "ACTS_ON_LEAVES", False),
        "draws": bool(draws),
        "clock": "slowest" in values,
    }
    hyperparameters = {}
    for argument in inspect.signature(factory).parameters:
        # Here no leaf holds several layers.
        if argument in values and argument != "layered":
            hyperparameters[argument] = {
                "value": to_json_value(values[argument])
            } | symbol(doc.parameters[argument])
    content: dict[str, Any] = {
        "algorithm": algorithm,
        "source": doc.source,
        "about": joined(f"{module.__doc__} {case.recurrence.__doc__ or ''}"),
        "needs": [need for need in NEEDS if needs[need]],
        "workers": case.workers,
        "leaves": {leaf: list(shape) for leaf, shape in SHAPES.items()},
        "hyperparameters": hyperparameters,
        "departures": {
            argument: to_json_value(value)
            for argument, value in case.departures.items()
        },
        "inner_optimizer": describe_inner_optimizer(case),
    }
    if "slowest" in values:
        content["clock"] = describe_clock(values["slowest"])
    if draws:
        content["draws"] = describe_draws(module)
        content["drawn"] = [
            {"at": [*numbers], "draw": to_json_value(draw)}
            for numbers, draw in draws.items()
        ]
    content["start"] = to_json_value(START)
    content["steps"] = []
    for step, (center, params) in enumerate(path):
        first = step * case.workers
        gradients = records.gradients[first : first + case.workers]
        content["steps"].append(
            {
                "gradients": to_json_value(np.array(gradients)),
                "params": to_json_value(np.round(stack_params(params), DECIMALS)),
                "center": to_json_value(np.round(center, DECIMALS)),
            }
        )
    return content


class Records(NamedTuple):
    """What a recurrence took.

    Attributes:
        gradients: the gradients, (size,) each, step by step and worker by worker.
        draws: the random draws, by the numbers that were folded into their keys.
        cut_vectors: the vectors that it cut into leaves.
    """

    gradients: list[np.ndarray]
    draws: dict[tuple[int, ...], Any]
    cut_vectors: list[Any]


@contextmanager
def record_state() -> Iterator[Records]:
    """Yields what recurrences take meanwhile."""
    records = Records([], {}, [])
    numbers_by_key: dict[bytes, tuple[int, ...]] = {}
    worker_gradient = recurrences.worker_gradient
    unflatten = recurrences.unflatten
    fold_in = jax.random.fold_in

    def record_gradient(*args: Any) -> np.ndarray:
        gradient = np.round(worker_gradient(*args), 5)
        records.gradients.append(gradient)
        return gradient

    def record_cut(vector: Any) -> Any:
        records.cut_vectors.append(vector)
        return unflatten(vector)

    def record_fold(key: jax.Array, number: int) -> jax.Array:
        new_key = fold_in(key, number)
        numbers = numbers_by_key.get(key_bytes(key), ())
        numbers_by_key[key_bytes(new_key)] = (*numbers, int(number))
        return new_key

    def recording(kind: str) -> Callable[..., np.ndarray]:
        draw = getattr(jax.random, kind)

        def record_draw(key: jax.Array, *args: Any) -> np.ndarray:
            value = np.asarray(draw(key, *args))
            if kind == "uniform":
                value = np.round(value.astype(float), 6)
            records.draws[numbers_by_key[key_bytes(key)]] = value
            return value

        return record_draw

    with ExitStack() as stack:
        for module in (recurrences, des_loc):
            stack.enter_context(
                patch.object(module, "worker_gradient", record_gradient)
            )
        stack.enter_context(patch.object(recurrences, "unflatten", record_cut))
        for kind in ("uniform", "normal", "permutation", "randint"):
            stack.enter_context(patch.object(jax.random, kind, recording(kind)))
        stack.enter_context(patch.object(jax.random, "fold_in", record_fold))
        yield records


def key_bytes(key: jax.Array) -> bytes:
    return np.asarray(jax.random.key_data(key)).tobytes()


def describe_clock(slowest: float) -> dict[str, Any]:
    """Returns the speeds of the workers, the last of which has that of the slowest."""
    unit = 1024
    lost = unit - round(unit * slowest)
    speeds = [unit - lost * worker // (WORKERS - 1) for worker in range(WORKERS)]
    return {"speeds": speeds, "unit": unit}


def describe_draws(recurrence: ModuleType) -> dict[str, Any]:
    """Returns what a recurrence says of its random numbers.

    Raises:
        ValueError: it says nothing.
    """
    if not hasattr(recurrence, "DRAWS"):
        raise ValueError(
            f"{recurrence.__name__} draws random numbers: set its DRAWS to a text that "
            'says what a draw is for, and a list of what numbers it, such as ["step"]'
        )
    about, numbers = recurrence.DRAWS
    return {"about": about, "of": numbers}


def stack_params(params: list[np.ndarray]) -> np.ndarray:
    """Stacks the workers' params: one row for all, if they agree."""
    rows = np.array(params)
    return rows[:1] if np.all(rows == rows[0]) else rows


def describe_inner_optimizer(case: VectorCase) -> dict[str, Any]:
    """Returns the inner optimizer's name and hyperparameters."""
    learning_rate = to_json_value(case.settings.get("learning_rate", LR))
    if case.recurrence is des_loc.adam_recurrence:
        moments = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
        return {"name": "Adam", "learning_rate": learning_rate, **moments}
    return {
        "name": "heavy ball: m <- momentum m + g; params <- params - learning_rate m",
        "learning_rate": learning_rate,
        "momentum": MOMENTUM,
    }


def symbol(text: str) -> dict[str, str]:
    """Returns the paper's symbol, with which an argument's text begins, if it does."""
    match = re.match(r"([^\W\d]\w?)(?:,| at )", text)
    return {"symbol": match[1]} if match else {}


def to_json_value(value: Any) -> Any:
    """Turns a value into one of JSON: a schedule becomes the rate of each step."""
    if callable(value):
        return [rate(value, step) for step in range(STEPS + 1)]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


# How deep an entry is written line by line: 1 has a line for each of its items.
DEPTHS = {"steps": 2, "drawn": 1, "hyperparameters": 1}


def format_file(content: dict[str, Any]) -> str:
    """Writes a file's content, a line for each entry that is long."""
    entries = []
    for name, value in content.items():
        entries.append(f"{one_line(name)}: {lines(value, DEPTHS.get(name, 0))}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def lines(value: Any, depth: int) -> str:
    """Writes a value, with a line for each item down to a depth."""
    if not depth or not value:
        return one_line(value)
    if isinstance(value, dict):
        items = [
            f"{one_line(name)}: {lines(item, depth - 1)}"
            for name, item in value.items()
        ]
        return "{\n" + ",\n".join(items) + "\n}"
    if isinstance(value, list) and isinstance(value[0], dict):
        items = [lines(item, depth - 1) for item in value]
        return "[\n" + ",\n".join(items) + "\n]"
    return one_line(value)


def one_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def fill_needs(page: str, needs_by_name: Mapping[str, Sequence[str]]) -> str:
    """Returns the text of docs/conformance.md with the files that have each need."""
    title = "## What a file can test\n"
    introduction, _, section = page.partition(title)
    for need in NEEDS:
        names = [name for name, needs in needs_by_name.items() if need in needs]
        cell = ", ".join(f"`{name}`" for name in sorted(names))
        row = re.compile(rf"(?<=^\| `{need}` \| )[^|]*(?= \|)", re.MULTILINE)
        section = row.sub(cell, section)
    count = sum(not needs for needs in needs_by_name.values())
    section = re.sub(r"\d+(?= that are not named below)", str(count), section)
    return introduction + title + section


def main() -> None:
    needs_by_name = {}
    for name in list_files():
        file = vectors(name)
        (FOLDER / f"{name}.json").write_text(format_file(file), "utf-8")
        needs_by_name[name] = file["needs"]
    page = PAGE.read_text("utf-8")
    PAGE.write_text(fill_needs(page, needs_by_name), "utf-8")


if __name__ == "__main__":
    main()
