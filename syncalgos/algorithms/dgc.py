"""Deep gradient compression: the largest entries of gradients with local momentum."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks, collectives, reducers
from syncalgos._dtypes import if_finite, narrow, widen, zeros
from syncalgos.collectives._axes import same_on_all
from syncalgos.reducers import _stacking
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    PyTree,
    Replica,
    Strategy,
    factory,
)


class DgcState(NamedTuple):
    """The momentum u, and v, its sum that is still unsent."""

    momentum: PyTree
    unsent: PyTree


@factory(static=["density"])
def dgc(
    density: float = 0.001,
    local_momentum: float = 0.9,
    *,
    local_clip: float | None = None,
    dense_steps: int = 100,
    layered: _stacking.Layered = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """Deep gradient compression: top-k with corrected and masked momentum.

    At every local step, for worker i's gradients g of leaves with two axes or more, |g|
    their norm over all leaves, N workers, and u and v, 0 at first:

        with `local_clip`, c: g ← g min(1, c / (√N |g|))
        u ← m u + g;   v ← v + u;   d ← TopK(v);   g ← mean(d)
        v ← v - d;   u ← 0 where d was sent
        all other leaves: u ← m u + mean(g);   g ← u

    Args:
        density: the share of a leaf that is sent, rounded up; above 0, at most 1.
        local_momentum: m, in place of the inner optimizer's; at least 0 and below 1.
        local_clip: √workers × the largest gradient norm, above 0; None means no limit.
        dense_steps: local steps over which the density falls to `density`: 1/4, 1/16,
            1/64 and 1/256 for a quarter of them each. The paper takes four epochs.
        layered: which leaves hold several layers, each sent as a leaf (see `Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: u and v, like params, at least float32, each worker's own. A
        step gathers values and indices; other leaves are averaged. Replicas agree.

    Raises:
        ValueError: a parameter outside its range.

    A steady drift goes from 1 to 1 / (1 - m) times as far as plain averaging takes it:
    1 for entries sent at every step, the most for rare ones.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, dgc
        >>> matrix = np.ones((100, 100), np.float32)
        >>> sent = communication(dgc(dense_steps=4), matrix, workers=2, steps=5)
        >>> np.diff(sent.per_step, prepend=0)
        array([15000.,  3750.,   942.,   240.,    60.])

    Source: Lin et al., "Deep gradient compression", ICLR 2018; the authors' code.

    Family: Compressed gradients.
    """
    density = checks.density("dgc", density)
    m = checks.real("dgc: local_momentum", local_momentum, least=0, below=1)
    if local_clip is not None:
        local_clip = checks.real("dgc: local_clip", local_clip, above=0)
    dense_steps = checks.whole("dgc: dense_steps", dense_steps, least=0)
    layered = _stacking.check_layered("dgc: layered", layered)
    densities = {density}
    if dense_steps:
        densities |= {max(density, 4.0**-i) for i in range(1, 5)}
    falling_densities = sorted(densities, reverse=True)

    def init(params: PyTree) -> DgcState:
        return DgcState(zeros(params), zeros(params))

    def combine_leaf(
        density: float,
        g: jax.Array,
        u: jax.Array,
        v: jax.Array,
        pieces: _stacking.Pieces,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        # Vectors and scalars are sent whole: masking would remove all momentum.
        if g.ndim - pieces.layers < 2:
            u = m * u + collectives.mean(g, axis)
            return u, u, v
        u = m * u + g
        reducer = reducers.top_k(density, axis=axis)
        combine = pieces.map(lambda x: reducer.combine(x, (), 0)[:2])
        combined, sent_entries = map(pieces.join, combine(pieces.split(v + u)))
        return combined, jnp.where(sent_entries != 0, 0, u), v + u - sent_entries

    def combine_grads(
        density: float, grads: PyTree, state: DgcState
    ) -> tuple[PyTree, ...]:
        pieces = _stacking.pieces_like(layered, grads)
        return over_leaves(partial(combine_leaf, density), 3, grads, *state, pieces)

    def reduce(
        grads: PyTree, replica: Replica, state: DgcState, step: Any
    ) -> tuple[PyTree, DgcState]:
        collectives.no_mean("a mean of the workers' own momenta")
        wide_grads = widen(grads)
        if local_clip is not None:
            # Independent gradients of N workers add up to √N times the norm of one.
            clip = optax.clip_by_global_norm(local_clip / collectives.size(axis) ** 0.5)
            wide_grads, _ = clip.update(wide_grads, optax.EmptyState())
        step = same_on_all(step, axis)
        quarter = jnp.minimum(step, dense_steps) * 4 // max(dense_steps, 1)
        branches = [partial(combine_grads, density) for density in falling_densities]
        combined, *new_state = jax.lax.switch(quarter, branches, wide_grads, state)
        new_state = if_finite(combined, DgcState(*new_state), state)
        return narrow(combined, grads), new_state

    return Strategy(init, reduce, center=MeanCenter(axis), own_momentum=True)
