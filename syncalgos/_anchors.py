"""Anchors: where workers start a round, how far they move, and how they restart."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks, collectives
from syncalgos._dtypes import narrow, widen
from syncalgos.strategy import Axis, PyTree, Replica


def start(anchor: PyTree, params: PyTree) -> PyTree:
    """The anchor as the workers received it, at least float32."""
    # Rounded to the params' dtypes first: measured from the float32 anchor, its
    # rounding would count as a move, and steps below bfloat16's 8 bits never add up.
    return widen(narrow(anchor, params))


def pseudo_gradient(anchor: PyTree, params: PyTree) -> PyTree:
    """anchor - params, at least float32."""
    return jax.tree.map(jnp.subtract, start(anchor, params), widen(params))


def restart(replica: Replica, anchor: PyTree) -> Replica:
    """The replica with its params at the anchor, in their own dtypes."""
    return replica._replace(params=narrow(anchor, replica.params))


def shipped(field: str, axis: Axis | None = None) -> Callable[[PyTree, PyTree], PyTree]:
    """A center: the named field of the state, or its mean over an axis."""

    def center(params: PyTree, state: Any) -> PyTree:
        model = getattr(state, field)
        if axis is not None:
            model = collectives.mean(model, axis)
        return narrow(model, params)

    return center


def outer_rates(where: str, lr: float, momentum: float) -> tuple[float, float]:
    """Returns an algorithm's outer_lr and outer_momentum, or raises a ValueError."""
    lr = checks.real(f"{where}: outer_lr", lr, above=0)
    return lr, checks.real(f"{where}: outer_momentum", momentum, least=0, below=1)


def nesterov_sgd(
    where: str, lr: float, momentum: float
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo's outer optimizer: m ← μ m + g, then a step of -η (g + μ m)."""
    lr, momentum = outer_rates(where, lr, momentum)
    return optax.sgd(lr, momentum=momentum, nesterov=True)
