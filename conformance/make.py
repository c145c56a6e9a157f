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


class Case(NamedTuple):
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


def case(name: str) -> Case:
    """Returns the settings of a file: the first, in which all terms are alive.

    Those of sync_sgd are those of quantized_sgd, so the plain mean takes their place;
    those of des_loc have second moments only under Adam. A name with a dot is one of an
    algorithm's VARIANTS, which may name another number of workers.
    """
    if name == "des_loc":
        return Case(des_loc.adam_recurrence, des_loc.ADAM_SETTINGS[-1], {})
    algorithm, _, variant = name.partition(".")
    module = import_module(f"recurrences.{algorithm}")
    if variant:
        entry = module.VARIANTS[variant]
    else:
        entry = module.SETTINGS[1 if name == "sync_sgd" else 0]
    settings, departures = entry if isinstance(entry, tuple) else (entry, {})
    workers = departures.get("workers", WORKERS)
    departures = {x: value for x, value in departures.items() if x != "workers"}
    return Case(module.recurrence, settings, departures, workers)


@contextmanager
def recorded() -> Iterator[tuple[list[np.ndarray], dict[tuple, Any], list[Any]]]:
    """Yields what recurrences take meanwhile: gradients, draws by numbers, leaves."""
    gradients = []
    draws = {}
    cut = []
    folded = {}
    plain = recurrences.worker_gradient
    unflatten = recurrences.unflatten

    def gradient(*args):
        gradients.append(np.round(plain(*args), 5))
        return gradients[-1]

    def unflattened(vector):
        cut.append(vector)
        return unflatten(vector)

    def bits(key):
        return np.asarray(jax.random.key_data(key)).tobytes()

    def fold_in(key, number, made=jax.random.fold_in):
        new = made(key, number)
        folded[bits(new)] = *folded.get(bits(key), ()), int(number)
        return new

    def drawn(kind, made):
        def draw(key, *args):
            value = np.asarray(made(key, *args))
            if kind == "uniform":
                value = np.round(value.astype(float), 6)
            draws[folded[bits(key)]] = value
            return value

        return draw

    with ExitStack() as patched:
        for module in (recurrences, des_loc):
            patched.enter_context(patch.object(module, "worker_gradient", gradient))
        patched.enter_context(patch.object(recurrences, "unflatten", unflattened))
        patched.enter_context(patch.object(jax.random, "fold_in", fold_in))
        for kind in ("uniform", "normal", "permutation", "randint"):
            draw = drawn(kind, getattr(jax.random, kind))
            patched.enter_context(patch.object(jax.random, kind, draw))
        yield gradients, draws, cut


def vectors(name: str) -> dict[str, Any]:
    """Returns what a file holds, as docs/conformance.md describes it."""
    of = case(name)
    algorithm = name.partition(".")[0]
    factory = syncalgos.ALGORITHMS[algorithm]
    with jax.enable_x64(True), recorded() as (gradients, draws, cut):
        path = of.recurrence(of.workers, **of.settings, **of.departures)
        path = [(center, list(theta)) for center, theta in path]
    if name == "noloco":
        table = noloco.matchings(WORKERS, of.settings["seed"])
        draws = {at: list(table[index]) for at, index in draws.items()}
    doc = parsed(factory)
    module = import_module(f"recurrences.{algorithm}")
    given = inspect.signature(of.recurrence).parameters
    values = {x: p.default for x, p in given.items()} | of.settings
    made = {
        "algorithm": algorithm,
        "source": doc.source,
        "about": joined(f"{module.__doc__} {of.recurrence.__doc__ or ''}"),
        "needs": [
            need
            for need, is_so in (
                ("leaves", cut or getattr(module, "ACTS_ON_LEAVES", False)),
                ("draws", draws),
                ("clock", "slowest" in values),
            )
            if is_so
        ],
        "workers": of.workers,
        "leaves": {leaf: list(shape) for leaf, shape in SHAPES.items()},
        "hyperparameters": {
            x: {"value": plain(values[x])} | symbol(doc.parameters[x])
            for x in inspect.signature(factory).parameters
            if x in values and x != "layered"  # here no leaf holds several layers
        },
        "departures": {x: plain(value) for x, value in of.departures.items()},
        "inner_optimizer": inner(of),
    }
    if "slowest" in values:
        lost = 1024 - round(1024 * values["slowest"])
        speeds = [1024 - lost * i // (WORKERS - 1) for i in range(WORKERS)]
        made["clock"] = {"speeds": speeds, "unit": 1024}
    if draws:
        made["draws"] = describe_draws(module)
        made["drawn"] = [{"at": [*at], "draw": plain(x)} for at, x in draws.items()]
    made["start"] = plain(START)
    made["steps"] = [
        {
            "gradients": plain(np.array(gradients[step * of.workers :][: of.workers])),
            "params": plain(np.round(together(theta), DECIMALS)),
            "center": plain(np.round(center, DECIMALS)),
        }
        for step, (center, theta) in enumerate(path)
    ]
    return made


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


def together(theta: list[np.ndarray]) -> np.ndarray:
    """Stacks the workers' params: one row for all, if they agree."""
    rows = np.array(theta)
    return rows[:1] if np.all(rows == rows[0]) else rows


def inner(of: Case) -> dict[str, Any]:
    """Describes the inner optimizer."""
    learning_rate = plain(of.settings.get("learning_rate", LR))
    if of.recurrence is des_loc.adam_recurrence:
        moments = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
        return {"name": "Adam", "learning_rate": learning_rate, **moments}
    return {
        "name": "heavy ball: m <- momentum m + g; params <- params - learning_rate m",
        "learning_rate": learning_rate,
        "momentum": MOMENTUM,
    }


def symbol(text: str) -> dict[str, str]:
    """Returns the paper's symbol, with which an argument's text begins, if it does."""
    found = re.match(r"([^\W\d]\w?)(?:,| at )", text)
    return {"symbol": found[1]} if found else {}


def plain(value: Any) -> Any:
    """Turns a value into one of JSON: a schedule becomes the rate of each step."""
    if callable(value):
        return [rate(value, step) for step in range(STEPS + 1)]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def text(made: dict[str, Any]) -> str:
    """Writes a file's content, a line for each entry that is long."""

    def lines(value: Any, deep: int) -> str:
        if deep and value and isinstance(value, dict):
            body = [f"{one(x)}: {lines(y, deep - 1)}" for x, y in value.items()]
            return "{\n" + ",\n".join(body) + "\n}"
        if deep and value and isinstance(value, list) and isinstance(value[0], dict):
            return "[\n" + ",\n".join(lines(x, deep - 1) for x in value) + "\n]"
        return one(value)

    def one(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    deep = {"steps": 2, "drawn": 1, "hyperparameters": 1}
    body = [f"{one(x)}: {lines(y, deep.get(x, 0))}" for x, y in made.items()]
    return "{\n" + ",\n".join(body) + "\n}\n"


def fill_needs(page: str, needs_by_name: Mapping[str, Sequence[str]]) -> str:
    """Returns the text of docs/conformance.md with the files that have each need."""
    title = "## What a file can test\n"
    before, _, section = page.partition(title)
    for need in NEEDS:
        names = [name for name, needs in needs_by_name.items() if need in needs]
        cell = ", ".join(f"`{name}`" for name in sorted(names))
        row = re.compile(rf"(?<=^\| `{need}` \| )[^|]*(?= \|)", re.MULTILINE)
        section = row.sub(cell, section)
    count = sum(not needs for needs in needs_by_name.values())
    section = re.sub(r"\d+(?= that are not named below)", str(count), section)
    return before + title + section


def main() -> None:
    needs_by_name = {}
    for name in list_files():
        file = vectors(name)
        (FOLDER / f"{name}.json").write_text(text(file), "utf-8")
        needs_by_name[name] = file["needs"]
    page = PAGE.read_text("utf-8")
    PAGE.write_text(fill_needs(page, needs_by_name), "utf-8")


if __name__ == "__main__":
    main()
