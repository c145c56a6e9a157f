"""A reducer whose result is used one call later, so that it may travel meanwhile."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.reducers.resolve import AnyReducer, resolve


class LateState(NamedTuple):
    """The combined tree that is under way, and the reducer's own state."""

    under_way: PyTree
    reducer: PyTree


def late(
    reducer: AnyReducer = "mean", seed: int = 0, axis: Axis = WORKERS
) -> optax.GradientTransformationExtraArgs:
    """What a reducer combined at the last call; zeros at the first.

    In `every(H, outer_step(outer, late()))` outer gradients have a whole round to
    arrive, while the workers train on.

    Args:
        reducer: any reducer, its factory, or a name (see `AnyReducer`).
        seed: of a random reducer that is given by its factory or name.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        An optax transformation. State: what is under way, shaped like params, and the
        reducer's. Error feedback belongs inside, where its residual pairs with what
        was sent at the same call.
    """
    made = resolve("late", reducer, axis, seed)

    def init(params):
        return LateState(jax.tree.map(jnp.zeros_like, params), made.init(params))

    def update(updates, state, params=None, *, step=None, **_):
        combined, inner = made.update(updates, state.reducer, params, step=step)
        return state.under_way, LateState(combined, inner)

    return optax.GradientTransformationExtraArgs(init, update)
