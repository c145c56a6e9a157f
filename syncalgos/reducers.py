"""How values are combined over the workers: optax GradientTransformations.

A reducer takes one worker's tree and returns the combined tree, equal on all workers.
It serves gradients (`reduce_with`) and outer deltas (`outer_step`) alike.
"""

import inspect
from collections.abc import Callable
from typing import Any

import optax

from syncalgos import collectives
from syncalgos.collectives import WORKERS, Axis

Reducer = optax.GradientTransformation


def mean(axis: Axis = WORKERS) -> Reducer:
    """The exact mean over the workers; leaves that are no floats are kept."""
    return optax.stateless(lambda updates, params: collectives.mean(updates, axis))


def check_optimizer(where: str, optimizer: Any) -> None:
    """Raises a ValueError unless it is given an optax optimizer."""
    if not isinstance(optimizer, optax.GradientTransformation):
        named = getattr(optimizer, "__name__", None)
        hint = f" (call it: {named}(…))" if callable(optimizer) and named else ""
        if hasattr(optimizer, "gradient_transformation"):
            hint = " (pass its .gradient_transformation())"
        raise ValueError(f"{where} must be an optax optimizer, got {optimizer!r}{hint}")


def resolve(
    where: str, reducer: Reducer | Callable[..., Reducer], axis: Axis
) -> Reducer:
    """Returns the reducer, or what its factory makes for `axis`.

    Raises:
        ValueError: something else.
    """
    if isinstance(reducer, optax.GradientTransformation):
        return reducer
    if callable(reducer) and "axis" in inspect.signature(reducer).parameters:
        made = reducer(axis=axis)
        if isinstance(made, optax.GradientTransformation):
            return made
    raise ValueError(
        f"{where}: expected an optax GradientTransformation or a factory with a "
        f"keyword axis, got {reducer!r} (optax.stateless lifts a plain function)"
    )
