"""Reducers around reducers: losses are sent later, or results arrive later."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos._dtypes import if_finite, narrow, widen, zeros
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.reducers._reducer import Reducer, call_combine
from syncalgos.reducers._resolve import IN_TRANSFORMATION, AnyReducer, resolve
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
    wrapped = _resolve_with_feedback("error_feedback", reducer, axis, seed)
    decay = checks.share("error_feedback: decay", decay)

    def init(params: PyTree) -> FeedbackState:
        return FeedbackState(zeros(params), wrapped.init(params))

    def combine(
        updates: PyTree, state: FeedbackState, step: Any
    ) -> tuple[PyTree, PyTree, FeedbackState]:
        # Counts and other integers have no residual.
        def add_residual(x: jax.Array, e: jax.Array) -> jax.Array:
            return x + decay * e if jnp.issubdtype(x.dtype, jnp.floating) else x

        owed = jax.tree.map(add_residual, widen(updates), state.residual)
        participates = collectives.takes_part()
        if participates is not True:  # a worker that skips a round sends nothing
            owed = jax.tree.map(lambda x: jnp.where(participates, x, 0), owed)
        combined, sent_updates, inner_state = call_combine(
            wrapped.combine, owed, state.reducer, step
        )

        # An entry that is not finite may not have been sent, and would stay
        # permanently.
        def update_residual(x: jax.Array, sent_x: jax.Array, e: jax.Array) -> jax.Array:
            return jnp.where(jnp.isfinite(x) & participates, x - sent_x, e)

        residual = jax.tree.map(update_residual, owed, sent_updates, state.residual)
        new_state = if_finite(combined, FeedbackState(residual, inner_state), state)
        return narrow(combined, updates), narrow(sent_updates, updates), new_state

    return Reducer(combine, init, calls_late=wrapped.calls_late)


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
    wrapped = _resolve_with_feedback("ef21", reducer, axis, seed)
    beta = checks.real("ef21: local_momentum", local_momentum, least=0, below=1)

    def init(params: PyTree) -> Ef21State:
        zero = zeros(params)
        return Ef21State(zero, zero, zero, wrapped.init(params))

    def combine(
        updates: PyTree, state: Ef21State, step: Any
    ) -> tuple[PyTree, PyTree, Ef21State]:
        collectives.no_mean("a mean of the workers' own momenta")

        def update_momentum(m: jax.Array, x: jax.Array) -> jax.Array:
            # Counts and other integers have no momentum.
            has_momentum = jnp.issubdtype(x.dtype, jnp.floating)
            return beta * m + (1 - beta) * x if has_momentum else x

        momentum = jax.tree.map(update_momentum, state.momentum, widen(updates))
        changes = jax.tree.map(jnp.subtract, momentum, state.known)
        mean_change, sent_changes, inner_state = call_combine(
            wrapped.combine, changes, state.reducer, step
        )

        # An entry that is not finite may not have been sent, and would stay
        # permanently.
        def keep_finite(m: jax.Array, old_m: jax.Array) -> jax.Array:
            return jnp.where(jnp.isfinite(m), m, old_m)

        momentum = jax.tree.map(keep_finite, momentum, state.momentum)
        public_copy = jax.tree.map(jnp.add, state.known, sent_changes)
        mean = jax.tree.map(jnp.add, state.mean, mean_change)
        new_state = Ef21State(momentum, public_copy, mean, inner_state)
        new_state = if_finite(mean, new_state, state)
        return narrow(mean, updates), narrow(public_copy, updates), new_state

    return Reducer(combine, init, takes_feedback=False, calls_late=wrapped.calls_late)


def _resolve_any(where: str, reducer: AnyReducer, axis: Axis, seed: int) -> Reducer:
    """Returns the reducer; another transformation counts as having sent its result."""
    resolved = resolve(where, reducer, axis, seed)
    if isinstance(resolved, Reducer):
        return resolved

    def combine(
        updates: PyTree, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree, PyTree]:
        combined, state = resolved.update(updates, state, None, step=step)
        return combined, combined, state

    return Reducer(combine, resolved.init)


def _resolve_with_feedback(
    where: str, reducer: AnyReducer, axis: Axis, seed: int
) -> Reducer:
    """Returns the reducer; raises a ValueError for one that takes no feedback."""
    resolved = _resolve_any(where, reducer, axis, seed)
    if not resolved.takes_feedback:
        raise ValueError(
            f"{where}: reducer cannot have feedback: median, trimmed and clipped lose "
            "nothing to send later, and low_bit and ef21 have their own feedback"
        )
    return resolved


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
    begin with zeros. So does any other transformation around `late`, as it would not
    tell that results are late: write late(optax.chain(…)).

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
    wrapped = _resolve_any("late", reducer, axis, seed)

    def init(params: PyTree) -> LateState:
        return LateState(jax.tree.map(jnp.zeros_like, params), wrapped.init(params))

    def combine(
        updates: PyTree, state: LateState, step: Any
    ) -> tuple[PyTree, PyTree, LateState]:
        if IN_TRANSFORMATION.get():
            raise ValueError(
                "late: inside another transformation, such as optax.chain, nothing "
                "tells that results come a call later: put late around it, as "
                "late(optax.chain(…))"
            )
        combined, _, inner_state = call_combine(
            wrapped.combine, updates, state.reducer, step
        )
        return state.under_way, state.under_way, LateState(combined, inner_state)

    return Reducer(combine, init, calls_late=1 + wrapped.calls_late)
