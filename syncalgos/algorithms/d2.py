"""D²: gossip that is exact for workers with different data."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._anchors import restart
from syncalgos._dtypes import widen, zeros
from syncalgos.collectives import _topology as peers
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    PyTree,
    Replica,
    Strategy,
    factory,
)


class D2State(NamedTuple):
    """The worker's correction c."""

    correction: PyTree


@factory
def d2(
    mixing: float = 0.5, topology: checks.Symmetric = "ring", *, axis: Axis = WORKERS
) -> Strategy:
    """D², or exact diffusion: gossip that is corrected for its past mixing.

    After every local step, for params θ, c zero at first, W the weights of the graph
    (in a ring, 1/3 for a worker and for each neighbour), and V = (1 - m) I + m W, where
    I is the identity:

        φ ← θ + c;   c ← c + (V φ - φ);   θ ← V φ

    With the inner updates u this is xₜ₊₁ = V (2 xₜ - xₜ₋₁ + uₜ - uₜ₋₁).

    Args:
        mixing: m, the share of the weights W in V, above 0, at most 1; at 1 a ring of
            4, 6, … workers is at the edge of stability.
        topology: the graph of neighbours; in Python also edges, or weights that are
            symmetric and do not change: see `graph`.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: c, shaped like params, at least float32, each worker's own. A
        step sends φ to each neighbour, in float32 at least. The center is the mean of
        the replicas. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range, or a graph for a different number of
            workers.

    Replicas do not agree. With plain SGD as the inner optimizer and without noise, they
    converge to the minimum of the mean loss, unlike `gossip`. All workers must start
    from the same params.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, d2
        >>> sent = communication(d2(), np.ones(100, np.float32), workers=8, steps=1)
        >>> sent.bytes_per_worker, [*sent.by_collective]
        (800.0, ['permute'])

    Source: Tang et al., "D²: decentralized training over decentralized data", ICML
    2018, algorithm 1; Yuan et al., "Exact diffusion for distributed optimization and
    learning", 2018.

    Family: Peers instead of all.
    """
    mixing = checks.share("d2: mixing", mixing)
    # With one-way links V has complex eigenvalues, and the workers drift apart.
    graph = peers.check("d2", topology, fixed=True, symmetric=True)

    def init(params: PyTree) -> D2State:
        return D2State(zeros(params))

    # The paper's form keeps two copies, the last params and updates; this form keeps
    # one. The mean of c stays 0, up to rounding.
    def sync(replica: Replica, state: D2State, step: Any) -> tuple[Replica, D2State]:
        shifted = jax.tree.map(jnp.add, widen(replica.params), state.correction)
        moves = peers.moves(shifted, graph, step, axis)
        moves = jax.tree.map(lambda move: mixing * move, moves)
        correction = jax.tree.map(jnp.add, state.correction, moves)
        mixed = jax.tree.map(jnp.add, shifted, moves)
        return restart(replica, mixed), D2State(correction)

    return Strategy(init, sync=sync, center=MeanCenter(axis))
