"""Reducers around reducers: losses are sent later, or results arrive later."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.dtypes import if_finite, narrow, widen, zeros
from syncalgos.reducers.reducer import Reducer
from syncalgos.reducers.resolve import AnyReducer, resolve


class FeedbackState(NamedTuple):
    """The residual that this worker has not sent yet, and the reducer's own state."""

    residual: PyTree
    reducer: PyTree


def error_feedback(
    reducer: AnyReducer,
    decay: float = 1.0,
    seed: int = 0,
    axis: Axis = WORKERS,
) -> Reducer:
    """A reducer whose losses are added to its next input.

    With e the residual, and `sent` the part of its own input that a worker sent:

        x ← x + decay · e;   e ← x - sent;   combined = reducer(x)

    Args:
        reducer: any reducer, its factory, or a name (see `AnyReducer`). One that is no
            `Reducer` is taken to have sent its result.
        decay: the share of the residual that is kept, above 0 and at most 1.
        seed: seeds a random reducer that is given by its factory or name.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Reducer. State: e, shaped like params, at least float32, each worker's own;
        and the reducer's. Neither changes at a step whose result is not finite, nor
        e of a worker that skips a round of `participating`. It sends as much as the
        reducer.

    Raises:
        ValueError: a decay outside its range, or a reducer that takes no feedback.

    Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Stich,
    Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018; with decay: Sarfi
    et al., "SparseLoCo", 2025.
    """
    made = resolve("error_feedback", reducer, axis, seed)
    decay = checks.share("error_feedback: decay", decay)
    if not getattr(made, "takes_feedback", True):
        raise ValueError(
            "error_feedback: median, trimmed and clipped lose nothing that could be "
            "sent later, and low_bit has feedback of its own: use them alone"
        )

    def init(params):
        return FeedbackState(zeros(params), made.init(params))

    def combine(updates, state, step):
        # Counts and other integers have no residual.
        def add(x, e):
            return x + decay * e if jnp.issubdtype(x.dtype, jnp.floating) else x

        owed = jax.tree.map(add, widen(updates), state.residual)
        takes = collectives.takes_part()
        if takes is not True:  # one that skips a round sends nothing
            owed = jax.tree.map(lambda x: jnp.where(takes, x, 0), owed)
        if isinstance(made, Reducer):
            combined, sent, inner = made.combine(owed, state.reducer, step)
        else:
            combined, inner = made.update(owed, state.reducer, None, step=step)
            sent = combined

        # An entry that is not finite may not have been sent, and would stay for good.
        def left(x, mine, e):
            return jnp.where(jnp.isfinite(x) & takes, x - mine, e)

        residual = jax.tree.map(left, owed, sent, state.residual)
        state = if_finite(combined, FeedbackState(residual, inner), state)
        return narrow(combined, updates), narrow(sent, updates), state

    return Reducer(combine, init)


class LateState(NamedTuple):
    """The combined tree on its way, and the reducer's own state."""

    under_way: PyTree
    reducer: PyTree


def late(
    reducer: AnyReducer = "mean", seed: int = 0, axis: Axis = WORKERS
) -> optax.GradientTransformationExtraArgs:
    """A reducer whose result arrives one call later; zeros at the first call.

    In `every(outer_step(outer, late()), H)` outer gradients have a whole round to
    arrive, while the workers train on.

    Args:
        reducer: any reducer, its factory, or a name (see `AnyReducer`).
        seed: seeds a random reducer that is given by its factory or name.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        An optax transformation. State: the tree on its way, shaped like params, and the
        reducer's. It sends as much as the reducer. Error feedback belongs inside, where
        its residual pairs with what was sent at the same call.

    Raises:
        ValueError: an unknown reducer.
    """
    made = resolve("late", reducer, axis, seed)

    def init(params):
        return LateState(jax.tree.map(jnp.zeros_like, params), made.init(params))

    def update(updates, state, params=None, *, step=None, **_):
        combined, inner = made.update(updates, state.reducer, params, step=step)
        return state.under_way, LateState(combined, inner)

    return optax.GradientTransformationExtraArgs(init, update)
