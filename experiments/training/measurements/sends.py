"""The sends of a run at each step, in the format of summary.json."""

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # it imports jax, which would delay errors
    from syncalgos import Communication


class Sends(NamedTuple):
    """The sends of one worker at each local step of a run.

    Attributes:
        kinds: the kinds of steps, each with bytes and calls by collective; kind 0 sends
            nothing.
        steps: the kind of each local step.
    """

    kinds: list[dict[str, tuple[float, int]]]
    steps: list[int]


def sends(communication: "Communication") -> Sends:
    """Returns the sends at each step, with bytes rounded to thousandths."""
    columns = []
    for part in communication.by_collective.values():
        # Running totals have rounding errors, by which equal steps would differ.
        columns.append(np.round(np.diff(part.per_step, prepend=0.0), 3))
        columns.append(np.diff(part.calls_per_step, prepend=0))
    if not columns:
        return Sends([{}], [0] * len(communication.per_step))
    table = np.stack(columns, axis=1)  # (steps, 2 * collectives)
    nothing = np.zeros((1, table.shape[1]))  # sorts before all others
    rows, kind = np.unique(np.vstack([nothing, table]), axis=0, return_inverse=True)
    names = list(communication.by_collective)
    kinds = [
        {
            name: (float(row[2 * i]), int(row[2 * i + 1]))
            for i, name in enumerate(names)
            if row[2 * i] or row[2 * i + 1]
        }
        for row in rows
    ]
    return Sends(kinds, kind.reshape(-1)[1:].tolist())


def each_device(sent: float | None, devices: int) -> float | int | None:
    """Returns the bytes that each of a worker's devices sent, if known."""
    if sent is None:
        return None
    each = sent / devices
    return int(each) if each.is_integer() else each


def to_json(sends: Sends) -> dict[str, Any]:
    """Returns the sends as JSON, with equal steps in a row as kind*length."""
    runs = (f"{kind}*{len(list(run))}" for kind, run in groupby(sends.steps))
    kinds = [{name: list(sent) for name, sent in kind.items()} for kind in sends.kinds]
    return {"kinds": kinds, "steps": " ".join(runs)}


def from_json(content: Mapping[str, Any]) -> Sends:
    """Returns the sends from JSON; the inverse of `to_json`."""
    steps = []
    for run in content["steps"].split():
        kind, length = map(int, run.split("*"))
        steps += [kind] * length
    kinds = [
        {name: (float(size), int(calls)) for name, (size, calls) in kind.items()}
        for kind in content["kinds"]
    ]
    return Sends(kinds, steps)
