"""What each algorithm owes, as data: the conformance tests read it, no branch on names.

Most owe the same, so that a new algorithm is tested by existing. One that differs has a
row in OWED.
"""

import inspect
from typing import Any, NamedTuple

import syncalgos

PERIOD = 4


class Owed(NamedTuple):
    """What the conformance tests ask of an algorithm run with period PERIOD.

    Attributes:
        agree_every: replicas are equal after every so many steps, and only then.
        params_sent: how often params' bytes are ring-reduced in PERIOD steps.
        steps_that_send: of the first 2 · PERIOD local steps, from 0.
    """

    agree_every: int = PERIOD
    params_sent: int = 1
    steps_that_send: tuple[int, ...] = (PERIOD - 1, 2 * PERIOD - 1)


OWED = {
    "sync_sgd": Owed(1, PERIOD, tuple(range(2 * PERIOD))),
}

# Another legal value, for parameters whose default is None.
OTHER_VALUES: dict[str, Any] = {"block_momentum": 0.3}


def owed(name: str) -> Owed:
    """The algorithm's row."""
    return OWED.get(name, Owed())


def parameters(name: str) -> dict[str, Any]:
    """An algorithm's parameters and their values in these tests, the axis left out."""
    signature = inspect.signature(syncalgos.ALGORITHMS[name])
    defaults = {n: p.default for n, p in signature.parameters.items() if n != "axis"}
    return {**defaults, "period": PERIOD} if "period" in defaults else defaults


def other_value(name: str, parameter: str) -> Any:
    """A legal value that must change the result."""
    value = parameters(name)[parameter]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value - 1
    return OTHER_VALUES[parameter] if value is None else value / 2


def make(name: str, **changes: Any) -> syncalgos.Strategy:
    """The algorithm with a short period."""
    return syncalgos.ALGORITHMS[name](**{**parameters(name), **changes})
