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

# Values to run under, where a default will not do or is missing.
VALUES: dict[str, Any] = {"period": PERIOD, "learning_rate": 0.1}

# Another legal value, where half of the first will not do.
OTHER_VALUES: dict[str, Any] = {
    "block_momentum": 0.3,
    "learning_rate": lambda step: 0.1 / (1 + step),
}


def owed(name: str) -> Owed:
    """The algorithm's row."""
    return OWED.get(name, Owed())


def parameters(name: str) -> dict[str, Any]:
    """An algorithm's parameters and their values in these tests, the axis left out."""
    signature = inspect.signature(syncalgos.ALGORITHMS[name])
    defaults = {n: p.default for n, p in signature.parameters.items() if n != "axis"}
    return {n: VALUES.get(n, default) for n, default in defaults.items()}


def other_value(name: str, parameter: str) -> Any:
    """A legal value that must change the result."""
    value = parameters(name)[parameter]
    if parameter in OTHER_VALUES:
        return OTHER_VALUES[parameter]
    if isinstance(value, bool):
        return not value
    return value - 1 if isinstance(value, int) else value / 2


def make(name: str, **changes: Any) -> syncalgos.Strategy:
    """The algorithm with a short period."""
    return syncalgos.ALGORITHMS[name](**{**parameters(name), **changes})
