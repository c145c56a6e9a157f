"""CHOCO-SGD: gossip of compressed changes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.dtypes import widen
from syncalgos.reducers import hops, stacking
from syncalgos.reducers.reducer import is_sent, over_leaves, share_of
from syncalgos.reducers.stacking import Stacked
from syncalgos.strategy import MeanCenter, Strategy


class ChocoState(NamedTuple):
    """What neighbours know of this worker's params, and how far theirs are from it."""

    known: PyTree
    apart: PyTree


def choco_sgd(
    density: float = 0.1,
    consensus: float | None = None,
    stacked: Stacked = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """CHOCO-SGD: gossip on a ring that sends the largest changes alone.

    After every local step, for worker i's params θ, x̂ what its neighbours know of them,
    and W the weights of a ring (1/3 for a worker and each neighbour):

        q ← TopK(θ - x̂);   x̂ ← x̂ + q;   θ ← θ + γ (W x̂ - x̂)

    Args:
        density: the share of a leaf's entries that is sent, rounded up; above 0, at
            most 1.
        consensus: γ, the step to the neighbours, above 0, at most 1; none means 2 ×
            density, or 1 if that is less.
        stacked: which leaves hold several layers, of each of which the largest are sent
            as of a leaf (see `Stacked`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x̂ and W x̂ - x̂, shaped like params, at least float32, the
        worker's own. A step sends values and indices of q to two neighbours, of 16 bits
        in leaves of at most 65,536 entries, else of 32. The center is the mean of the
        replicas. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    Replicas do not agree; mixing leaves their mean as it is, whatever is lost. With γ
    above 4 × density they may drift apart for good. x̂ starts at the params, which must
    be equal on all workers, and not at 0 as in the paper.

    Source: Koloskova, Stich and Jaggi, "Decentralized stochastic optimization and
    gossip algorithms with compressed communication", ICML 2019, algorithm 2.
    """
    density = checks.share("choco_sgd: density", density)
    if consensus is None:
        consensus = min(1.0, 2 * density)
    consensus = checks.share("choco_sgd: consensus", consensus)
    stacked = stacking.check("choco_sgd: stacked", stacked)

    def init(params):
        known = widen(params)
        return ChocoState(known, jax.tree.map(jnp.zeros_like, known))

    def largest(x):
        flat = x.reshape(-1)
        _, chosen = jax.lax.top_k(jnp.abs(flat), share_of(density, x.size))
        return chosen.astype(hops.index_dtype(x.size)), flat[chosen]

    def mix(x, known, apart):
        chosen = largest(x.astype(known.dtype) - known)
        around = [collectives.shift(chosen, by, axis) for by in (-1, 1)]
        q, left, right = (
            jnp.zeros(x.size, known.dtype).at[indices].set(values).reshape(x.shape)
            for indices, values in (chosen, *around)
        )
        known, apart = known + q, apart + ((left - q) + (right - q)) / 3
        return (x + consensus * apart).astype(x.dtype), known, apart

    def sync(replica, state, step):
        counts = stacking.counts_like(stacked, replica.params)

        def leaf(x, known, apart, count):
            own = x, known, apart
            return stacking.layerwise(mix, count)(*own) if is_sent(x) else own

        params, *state = over_leaves(leaf, 3, replica.params, *state, counts)
        return replica._replace(params=params), ChocoState(*state)

    return Strategy(init, sync=sync, center=MeanCenter(axis))
