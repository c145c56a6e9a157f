"""What each algorithm owes, as data: the conformance tests read it, no branch on names.

A new algorithm adds a row to OWED, and a value to OTHER_VALUES for each new parameter.
"""

import inspect
from typing import Any, NamedTuple

import syncalgos


class Owed(NamedTuple):
    """What the conformance tests ask of an algorithm run with period PERIOD.

    Attributes:
        agree_every: replicas are equal after every so many steps; None: never.
        sends: how often params' bytes are ring-reduced in PERIOD steps.
        steps_of_sync: local steps, from 0, within the first 2 · PERIOD that send.
    """

    agree_every: int | None
    sends: int
    steps_of_sync: tuple[int, ...]


PERIOD = 4
OWED = {
    "sync_sgd": Owed(1, PERIOD, tuple(range(2 * PERIOD))),
    "model_averaging": Owed(PERIOD, 1, (3, 7)),
    "bmuf": Owed(PERIOD, 1, (3, 7)),
    "diloco": Owed(PERIOD, 1, (3, 7)),
}

# For every parameter of any algorithm: a legal value that must change the result.
OTHER_VALUES: dict[str, Any] = {
    "period": 3,
    "block_momentum": 0.3,
    "block_lr": 0.5,
    "nesterov": True,
    "outer_lr": 0.3,
    "outer_momentum": 0.5,
}


def parameters(name: str) -> list[str]:
    """An algorithm's parameters, the axis left out."""
    signature = inspect.signature(syncalgos.ALGORITHMS[name])
    return [p for p in signature.parameters if p != "axis"]


def make(name: str, **changes: Any) -> syncalgos.Strategy:
    """The algorithm with a short period."""
    arguments = {"period": PERIOD} if "period" in parameters(name) else {}
    return syncalgos.ALGORITHMS[name](**{**arguments, **changes})
