"""Reducers around reducers: losses are sent later, or results arrive later."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos._dtypes import if_finite, narrow, widen, zeros
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.reducers._reducer import Reducer, combined_by
from syncalgos.reducers._resolve import AnyReducer, resolve
from syncalgos.strategy import factory


class FeedbackState(NamedTuple):
    """The residual that this worker has not sent yet, and the reducer's own state."""

    residual: PyTree
    reducer: PyTree


@factory
def error_feedback(
    reducer: AnyReducer, *, decay: float = 1.0, seed: int = 0, axis: Axis = WORKERS
) -> Reducer:
    """A reducer whose unsent part is added to its next input.

    With e the residual, and `sent` the part of its own input that a worker sent:

        x ← x + decay · e;   e ← x - sent;   combined = reducer(x)

    Args:
        reducer: any reducer, its factory, or a name (see `AnyReducer`). Any other optax
            transformation counts as having sent its result.
        decay: the share of the residual that is kept, above 0 and at most 1.
        seed: seeds a random reducer that is given by its factory or name.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. State: e, shaped like params, at least float32, each worker's own;
        and the reducer's. Neither changes at a step if the result is not finite; e
        does not change if the worker skips a round of `participating`. It sends as
        much as the reducer.

    Raises:
        ValueError: a decay outside its range, or a reducer that takes no feedback.

    Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Stich,
    Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018; with decay: Sarfi
    et al., "SparseLoCo", 2025.
    """
    made = _fed("error_feedback", reducer, axis, seed)
    decay = checks.share("error_feedback: decay", decay)

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
        combined, sent, inner = combined_by(made.combine, owed, state.reducer, step)

        # An entry that is not finite may not have been sent, and would stay
        # permanently.
        def left(x, mine, e):
            return jnp.where(jnp.isfinite(x) & takes, x - mine, e)

        residual = jax.tree.map(left, owed, sent, state.residual)
        state = if_finite(combined, FeedbackState(residual, inner), state)
        return narrow(combined, updates), narrow(sent, updates), state

    return Reducer(combine, init)


class Ef21State(NamedTuple):
    """State of `ef21`.

    Attributes:
        momentum: this worker's momentum M.
        known: G, the others' copy of M.
        mean: the mean of all workers' G.
        reducer: the reducer's own state.
    """

    momentum: PyTree
    known: PyTree
    mean: PyTree
    reducer: PyTree


@factory
def ef21(
    reducer: AnyReducer,
    *,
    local_momentum: float = 0.9,
    seed: int = 0,
    axis: Axis = WORKERS,
) -> Reducer:
    """A reducer of momentum: each worker sends what changed in its momentum.

    With M a worker's momentum, G the others' copy of it, and `sent` the part of its own
    input that a worker sent:

        M ← β M + (1 - β) x;   c ← reducer(M - G);   G ← G + sent
        combined ← combined + c

    so that `combined` is the mean of all G.

    Args:
        reducer: any reducer, its factory, or a name (see `AnyReducer`). Any other optax
            transformation counts as having sent its result.
        local_momentum: β, the decay of M, at least 0 and below 1; 0 is EF21.
        seed: seeds a random reducer that is given by its factory or name.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. State: M and G, each worker's own, and the mean of all G, identical
        on all, shaped like params, at least float32; and the reducer's. None changes at
        a step if the result is not finite. It sends as much as the reducer.

    Raises:
        ValueError: a momentum outside its range, or a reducer that takes no feedback.

    With `optax.contrib.muon(rate, beta=0, nesterov=False)` it is EF21-Muon with an
    uncompressed server. `combined` drifts from the mean of all G if the reducer rounds
    its mean once more, as `quantized` does, or takes a vote.

    Source: Richtárik, Sokolov and Fatkhullin, "EF21: a new, simpler, theoretically
    better, and practically faster error feedback", NeurIPS 2021; Fatkhullin, Tyurin and
    Richtárik, "Momentum provably improves error feedback!", NeurIPS 2023; Gruntkowska
    et al., "Error feedback for Muon and friends", 2025.
    """
    made = _fed("ef21", reducer, axis, seed)
    beta = checks.real("ef21: local_momentum", local_momentum, least=0, below=1)

    def init(params):
        zero = zeros(params)
        return Ef21State(zero, zero, zero, made.init(params))

    def combine(updates, state, step):
        collectives.no_mean("a mean of the workers' own momenta")

        def average(m, x):
            # Counts and other integers have no momentum.
            floats = jnp.issubdtype(x.dtype, jnp.floating)
            return beta * m + (1 - beta) * x if floats else x

        momentum = jax.tree.map(average, state.momentum, widen(updates))
        unknown = jax.tree.map(jnp.subtract, momentum, state.known)
        change, sent, inner = combined_by(made.combine, unknown, state.reducer, step)

        # An entry that is not finite may not have been sent, and would stay
        # permanently.
        def kept(m, old):
            return jnp.where(jnp.isfinite(m), m, old)

        momentum = jax.tree.map(kept, momentum, state.momentum)
        known = jax.tree.map(jnp.add, state.known, sent)
        mean = jax.tree.map(jnp.add, state.mean, change)
        new = if_finite(mean, Ef21State(momentum, known, mean, inner), state)
        return narrow(mean, updates), narrow(known, updates), new

    return Reducer(combine, init, takes_feedback=False)


def _resolved(where: str, reducer: AnyReducer, axis: Axis, seed: int) -> Reducer:
    """Returns the reducer; another transformation counts as having sent its result."""
    made = resolve(where, reducer, axis, seed)
    if isinstance(made, Reducer):
        return made

    def combine(updates, state, step):
        combined, state = made.update(updates, state, None, step=step)
        return combined, combined, state

    return Reducer(combine, made.init)


def _fed(where: str, reducer: AnyReducer, axis: Axis, seed: int) -> Reducer:
    """Returns the reducer; raises a ValueError for one that takes no feedback."""
    made = _resolved(where, reducer, axis, seed)
    if not made.takes_feedback:
        raise ValueError(
            f"{where}: reducer cannot have feedback: median, trimmed and clipped lose "
            "nothing to send later, and low_bit and ef21 have their own feedback"
        )
    return made


class LateState(NamedTuple):
    """The combined tree on its way, and the reducer's own state."""

    under_way: PyTree
    reducer: PyTree


@factory
def late(
    reducer: AnyReducer = "mean", *, seed: int = 0, axis: Axis = WORKERS
) -> Reducer:
    """A reducer whose result arrives one call later; zeros at the first call.

    In `every(outer_step(outer, late()), period)`, pseudo-gradients have a whole round
    to arrive, while the workers continue training. `average` refuses it: params do not
    begin with zeros.

    Args:
        reducer: any reducer, its factory, or a name (see `AnyReducer`).
        seed: seeds a random reducer that is given by its factory or name.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. State: the tree on its way, shaped like params, and the reducer's. It
        sends as much as the reducer. Put error feedback inside `late`: then its
        residual pairs with the values sent in the same call.

    Raises:
        ValueError: an unknown reducer.
    """
    made = _resolved("late", reducer, axis, seed)

    def init(params):
        return LateState(jax.tree.map(jnp.zeros_like, params), made.init(params))

    def combine(updates, state, step):
        combined, _, inner = combined_by(made.combine, updates, state.reducer, step)
        return state.under_way, state.under_way, LateState(combined, inner)

    return Reducer(combine, init, calls_late=1 + made.calls_late)
