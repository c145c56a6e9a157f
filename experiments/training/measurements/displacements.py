"""Displacements: how far workers move between two syncs, and how much they agree.

A round is a sequence of local steps that ends with a step at which anything is sent.
The displacement dᵢ is the change of worker i's params from right after one sync to
right before the next. The pseudo-gradient is -mean(d). The mean of cos(dᵢ, dⱼ) over
pairs of workers measures their agreement: 1 if all see the same data, 0 if noise
dominates.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from syncalgos import Strategy, TrainState, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.combinators import introspection
from syncalgos.combinators.introspection import Combination
from syncalgos.dtypes import widen
from syncalgos.strategy import apply_sync

# Stands for NaN, which jax_debug_nans refuses; no norm or cosine has this value.
NONE = -2.0
NAMES = ("pseudo_gradient", "displacement_cosine", "drift")


class Measured(NamedTuple):
    """State of `measured`.

    Attributes:
        strategy: the state of the measured strategy.
        start: this worker's params at the start of the last round to measure.
        noted: the figures of the last measured round by name, float32 scalars.
    """

    strategy: PyTree
    start: PyTree
    noted: dict[str, jax.Array]


def measured(
    strategy: Strategy,
    sync_steps: np.ndarray,
    evaluated: Sequence[int],
    axis: Axis = WORKERS,
) -> Strategy:
    """Returns the same strategy, which also records the displacements of some rounds.

    For each evaluation, the last round that ended before it is measured. Measuring
    sends the params three times per such round, which `communication` would count:
    call it with the plain strategy instead.

    Args:
        strategy: the strategy of a whole run. It trains the same params, except for
            their last bits if XLA fuses a step differently because of the measurement.
        sync_steps: whether anything is sent at each step, (steps,) booleans.
        evaluated: local steps done at each evaluation.
        axis: the mapped axis or axes of the workers.

    Returns:
        A Strategy. State: the strategy's, and one copy of the params that it sees.
        Changes that a delayed strategy makes within a round count as displacement.
    """
    begins, ends = _measured_rounds(np.asarray(sync_steps, bool), evaluated)

    def init(params):
        none = {name: jnp.float32(NONE) for name in NAMES}
        return Measured(strategy.init(params), params, none)

    def sync(replica, state, step):
        noted = lax.cond(
            _holds(ends, step),
            lambda: _compare(replica.params, state.start, axis),
            lambda: state.noted,
        )
        # Otherwise XLA might fuse the local step differently, and round differently.
        apart = noted, replica, state.strategy
        noted, replica, own = lax.optimization_barrier(apart)
        synced = apply_sync(strategy, replica, own, step)
        replica, own = lax.optimization_barrier(synced)
        start = lax.cond(
            _holds(begins, step + 1), lambda: replica.params, lambda: state.start
        )
        return replica, Measured(own, start, noted)

    def notes(step):
        return _holds(begins, step + 1) | _holds(ends, step)

    # The engine runs the strategy in the same form as without the measurement.
    return strategy._replace(
        init=init,
        reduce=introspection.inner_reduce(strategy),
        sync=Combination(
            sync,
            (strategy,),
            lambda change: measured(change(strategy), sync_steps, evaluated, axis),
        ),
        center=introspection.inner_center(strategy),
        acts=introspection.at_any(introspection.acting_steps(strategy), notes),
    )


def figures(state: TrainState) -> dict[str, float]:
    """Returns the displacements that a measured strategy recorded last.

    Returns:
        pseudo_gradient, the 2-norm over all params that the strategy sees;
        displacement_cosine, the mean over pairs of workers; and drift, the root mean
        square distance of replicas to their mean, right before the sync. All are NaN if
        no round has ended yet, or the strategy is not `measured`. The cosine is NaN if
        there is one worker, or one did not move.
    """
    noted = state.sync.noted if isinstance(state.sync, Measured) else {}
    return {name: _read(noted.get(name, NONE)) for name in NAMES}


def _measured_rounds(
    sync_steps: np.ndarray, evaluated: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns which steps begin a measured round, and which end one."""
    lasts = np.flatnonzero(sync_steps)  # of all rounds
    firsts = np.concatenate([[0], lasts + 1])
    ended = np.searchsorted(lasts, np.asarray(evaluated, int))  # rounds by then
    rounds = np.unique(ended[ended > 0]) - 1
    begins, ends = np.zeros_like(sync_steps), np.zeros_like(sync_steps)
    begins[firsts[rounds]] = ends[lasts[rounds]] = True
    return begins, ends


def _holds(table: np.ndarray, step: jax.Array) -> jax.Array:
    return jnp.asarray(table).at[step].get(mode="fill", fill_value=False)


def _compare(params: PyTree, start: PyTree, axis: Axis) -> dict[str, jax.Array]:
    """Returns the displacements of a round that ends with these params."""
    workers = collectives.size(axis)
    params = widen(params)
    moved = jax.tree.map(jnp.subtract, params, widen(start))
    apart = jax.tree.map(jnp.subtract, params, collectives.mean(params, axis))
    distance = collectives.mean(optax.tree.norm(apart, squared=True), axis)
    figures = (
        optax.tree.norm(collectives.mean(moved, axis)),
        NONE if workers == 1 else _cosine(moved, workers, axis),
        jnp.sqrt(distance),
    )
    return {name: jnp.float32(x) for name, x in zip(NAMES, figures, strict=True)}


def _cosine(moved: PyTree, workers: int, axis: Axis) -> jax.Array:
    """Returns the mean cosine between two workers' displacements."""
    length = optax.tree.norm(moved)
    stays = length == 0
    unit = jax.tree.map(lambda x: x / jnp.where(stays, 1, length), moved)
    # Each worker's direction times the sum of the others: unlike |Σu|² - N, this loses
    # no digits if directions are orthogonal.
    others = jax.tree.map(
        lambda mean, x: workers * mean - x, collectives.mean(unit, axis), unit
    )
    cosine = collectives.mean(optax.tree.vdot(unit, others), axis) / (workers - 1)
    is_defined = collectives.mean(stays.astype(jnp.float32), axis) == 0
    return jnp.where(is_defined, jnp.clip(cosine, -1, 1), NONE)


def _read(value: jax.Array | float) -> float:
    """Returns the value of one worker of this process; all have the same."""
    if isinstance(value, jax.Array):
        value = float(np.ravel(value.addressable_shards[0].data)[0])
    return value if value > NONE else np.nan
