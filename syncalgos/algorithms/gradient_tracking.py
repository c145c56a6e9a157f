"""Gradient tracking: gossip of params and of an estimate of the mean gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._anchors import restart
from syncalgos._combinators.turning import in_turns
from syncalgos._dtypes import if_finite, narrow, widen, zeros
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


class TrackingState(NamedTuple):
    """The correction c of a worker's gradients, and its params' change by mixing."""

    correction: PyTree
    moves: PyTree


# Old params are sent too, and gradients are used a step later.
@factory
def gradient_tracking(
    topology: checks.Topology = "ring", *, axis: Axis = WORKERS
) -> Strategy:
    """Gradient tracking: each worker steps along an estimate of the mean gradient.

    In every local step, for gradients g at params θ, c zero at first, W the weights of
    the graph (in a ring, 1/3 for a worker and for each neighbour), and u the inner
    update along y:

        y ← g + c;   c ← c + (W y - y);   θ ← W θ + u

    This is y ← W y + g - (g of the step before): the mean of y is always that of g.

    Args:
        topology: the graph of neighbours; in Python also edges or weights: see `graph`.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: c and the change of params by mixing, shaped like params, at
        least float32, each worker's own. A step sends θ, and y in float32 at least, to
        each neighbour. The center is the mean of the replicas. opt_state and buffers
        stay local.

    Raises:
        ValueError: an unknown graph, or a graph for a different number of workers.

    Replicas do not agree. With plain SGD as the inner optimizer and without noise, they
    converge to the minimum of the mean loss, unlike `gossip`. A worker's gradient that
    is not finite counts as 0 for the others.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, gradient_tracking
        >>> model = np.ones(100, np.float32)
        >>> sent = communication(gradient_tracking(), model, workers=8, steps=1)
        >>> sent.bytes_per_worker / model.nbytes  # two arrays to two peers
        4.0

    Source: Nedić, Olshevsky and Shi, "Achieving geometric convergence for distributed
    optimization over time-varying graphs", SIAM J. Optim. 2017 (DIGing); Pu and Nedić,
    "Distributed stochastic gradient tracking methods", 2020.

    Family: Peers instead of all.
    """
    graph = peers.check("gradient_tracking", topology)

    def init(params: PyTree) -> TrackingState:
        return TrackingState(zeros(params), zeros(params))

    # Params from before the step are mixed (DIGing): only reduce sees them.
    def reduce(
        grads: PyTree, replica: Replica, state: TrackingState, step: Any
    ) -> tuple[PyTree, TrackingState]:
        tracked = jax.tree.map(jnp.add, widen(grads), state.correction)
        # Each worker checks its own gradient alone; the mean of c stays 0.
        finite_grads = if_finite(grads, tracked, state.correction)
        message = finite_grads, replica.params
        changes, moves = peers.moves(message, graph, step, axis)
        correction = jax.tree.map(jnp.add, state.correction, changes)
        return narrow(tracked, grads), TrackingState(correction, moves)

    def sync(
        replica: Replica, state: TrackingState, step: Any
    ) -> tuple[Replica, TrackingState]:
        mixed = jax.tree.map(jnp.add, replica.params, state.moves)
        return restart(replica, mixed), state

    return in_turns(graph, Strategy(init, reduce, sync, MeanCenter(axis), late=1))
