"""Deep gradient compression: the largest entries of gradients with local momentum."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks, collectives, reducers
from syncalgos._dtypes import if_finite, narrow, widen, zeros
from syncalgos.reducers import _stacking
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import WORKERS, Axis, MeanCenter, PyTree, Strategy, factory


class DgcState(NamedTuple):
    """The momentum u, and v, its sum that is still unsent."""

    momentum: PyTree
    unsent: PyTree


@factory
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
    layered = _stacking.check("dgc: layered", layered)
    falling = [max(density, 4.0**-i) for i in range(1, 5)] if dense_steps else []
    densities = sorted({density, *falling}, reverse=True)

    def init(params):
        return DgcState(zeros(params), zeros(params))

    def leaf(density, g, u, v, pieces):
        # Vectors and scalars are sent whole: masking would remove all momentum.
        if g.ndim - pieces.layers < 2:
            u = m * u + collectives.mean(g, axis)
            return u, u, v
        u = m * u + g
        largest = reducers.top_k(density, axis=axis).combine
        pair = pieces.each(lambda x: largest(x, (), 0)[:2])(pieces.split(v + u))
        combined, sent = map(pieces.join, pair)
        return combined, jnp.where(sent != 0, 0, u), v + u - sent

    def send(density, grads, state):
        pieces = _stacking.pieces_like(layered, grads)
        return over_leaves(partial(leaf, density), 3, grads, *state, pieces)

    def reduce(grads, replica, state, step):
        collectives.no_mean("a mean of the workers' own momenta")
        own = widen(grads)
        if local_clip is not None:
            # Independent gradients of N workers add up to √N times the norm of one.
            most = local_clip / collectives.size(axis) ** 0.5
            own, _ = optax.clip_by_global_norm(most).update(own, optax.EmptyState())
        quarter = jnp.minimum(step, dense_steps) * 4 // max(dense_steps, 1)
        ways = [partial(send, each) for each in densities]
        combined, *new = jax.lax.switch(quarter, ways, own, state)
        return narrow(combined, grads), if_finite(combined, DgcState(*new), state)

    return Strategy(init, reduce, center=MeanCenter(axis), own_momentum=True)
