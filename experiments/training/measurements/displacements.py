"""Displacements: how far workers go between two syncs, and how much they agree.

A round is a stretch of local steps that ends with one at which anything is sent. In it
worker i's params go from θᵢ, right after the last sync, by dᵢ, before the next one acts
on them. The pseudo-gradient is -mean(d), and cos(dᵢ, dⱼ), averaged over the pairs of
workers, says how much they agree: 1 where they see the same, 0 where noise drives them.
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

# Instead of NaN, at which jax_debug_nans would end the run; no norm and no cosine.
NONE = -2.0
NAMES = ("pseudo_gradient", "displacement_cosine", "drift")


class Measured(NamedTuple):
    """State of `measured`.

    Attributes:
        strategy: the measured one's own.
        start: this worker's params where the last round to be measured began.
        noted: by name, what the last round that was measured had; float32 scalars.
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
    """Returns the same strategy, which records the displacements of some rounds.

    Measured is the last round that ended by each evaluation. `communication` would
    count what measuring sends, the params thrice for each such round: ask it about the
    plain strategy.

    Args:
        strategy: of a whole run. It trains the same params, but for their last bits
            where XLA fuses a step in another way beside what is measured.
        sync_steps: whether anything is sent, (steps,) booleans.
        evaluated: local steps done at each evaluation.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the strategy's, and one copy of the params that it sees.
        What a delayed strategy puts in place within a round counts as gone there.
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
        # Else XLA might fuse the local step another way than without us, and round so.
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

    # The engine runs the strategy in the same form as without us.
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
        pseudo_gradient, its 2-norm over all params that the strategy sees;
        displacement_cosine, the mean over pairs of workers; and drift, the root mean
        square distance of a replica to their mean, right before the sync. NaN where no
        round has ended yet, where the strategy is not `measured`, and for the cosine of
        one worker, or of one that did not move.
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
    # Of a worker's direction with the sum of the others', which unlike |Σu|² - N loses
    # no digits where they are orthogonal.
    others = jax.tree.map(
        lambda mean, x: workers * mean - x, collectives.mean(unit, axis), unit
    )
    cosine = collectives.mean(optax.tree.vdot(unit, others), axis) / (workers - 1)
    is_defined = collectives.mean(stays.astype(jnp.float32), axis) == 0
    return jnp.where(is_defined, jnp.clip(cosine, -1, 1), NONE)


def _read(value: jax.Array | float) -> float:
    """Returns the value of one worker on this process: all agree."""
    if isinstance(value, jax.Array):
        value = float(np.ravel(value.addressable_shards[0].data)[0])
    return value if value > NONE else np.nan
