"""Stochastic gradient push: gossip over links that may fail one way."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._anchors import restart, shipped
from syncalgos._combinators.turning import in_turns
from syncalgos._dtypes import narrow, widen
from syncalgos._keys import own_key
from syncalgos.collectives import _topology as peers
from syncalgos.strategy import WORKERS, Axis, PyTree, Replica, Strategy, factory


class PushSumState(NamedTuple):
    """The numerators x and the weight w of the params z = x / w."""

    numerators: PyTree
    weight: jax.Array


@factory
def push_sum(
    drop: float = 0.0,
    topology: checks.Topology = "exponential",
    *,
    seed: int = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """Stochastic gradient push: push-sum gossip, exact over one-way links that fail.

    After every local step, for the inner update u, params z = x / w, and shares S,
    where Sᵢⱼ is the share of its sums that worker j gives to worker i; x starts at the
    params, and w at 1:

        x ← x + u;   (x, w)ᵢ ← Σⱼ Sᵢⱼ (x, w)ⱼ;   z ← x / w

    exponential, after step t, for N workers, modulo N: each keeps a half, and worker i
    gets the other half of worker i + 2^(t mod ⌈log₂ N⌉).

    Args:
        drop: the share of steps at which a worker fails to send, at least 0 and below
            1; it then keeps its whole sum, so nothing is lost.
        topology: who gives to whom; exponential is one peer a step, in turn. In Python
            also edges, or weights S, of which each column must add up to 1: see
            `graph`.
        seed: seeds the failures, which differ between workers.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x, shaped like params, at least float32, and w, each worker's
        own. A step sends x and w to each peer; one that fails counts,
        too. The center is the mean of x, which no failure shifts. opt_state and buffers
        stay local.

    Raises:
        ValueError: a parameter outside its range, or a graph for a different number of
            workers.

    Replicas do not agree. Without failures, all w stay 1, which is `gossip`. With
    failures, plain gossip would drift: its matrix would no longer keep the mean.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, push_sum
        >>> model = np.ones(100, np.float32)
        >>> sent = communication(push_sum(drop=0.1), model, workers=8, steps=1)
        >>> sent.bytes_per_worker - model.nbytes  # the weight
        4.0

    Source: Assran, Loizou, Ballas and Rabbat, "Stochastic gradient push for distributed
    deep learning", ICML 2019 (2018), algorithm 1.

    Family: Peers instead of all.
    """
    drop = checks.real("push_sum: drop", drop, least=0, below=1)
    graph = peers.check("push_sum", topology, columns=True, keeps=True)
    seed = checks.seed(seed)

    def init(params: PyTree) -> PushSumState:
        return PushSumState(widen(params), jnp.ones((), float))

    def sends(step: Any) -> bool | jax.Array:
        if not checks.is_traced(drop) and not drop:
            return True
        return jax.random.uniform(own_key(seed, step, axis)) >= drop

    def sync(
        replica: Replica, state: PushSumState, step: Any
    ) -> tuple[Replica, PushSumState]:
        x, w = state
        # u, measured from the worker's own z in its dtype.
        updates = jax.tree.map(lambda z, x: z - narrow(x / w, z), replica.params, x)
        sums = jax.tree.map(jnp.add, x, updates), w
        x, w = peers.push(sums, sends(step), graph, step, axis)
        return restart(replica, jax.tree.map(lambda x: x / w, x)), PushSumState(x, w)

    center = shipped("numerators", axis)
    return in_turns(graph, Strategy(init, sync=sync, center=center, axis=axis))
