"""GASLoC: DiLoCo's outer momentum with neighbours instead of all workers."""

from typing import Any, NamedTuple

import jax

from syncalgos import checks
from syncalgos._anchors import outer_rates, pseudo_gradient, restart, shipped
from syncalgos._combinators.schedule import every
from syncalgos._combinators.turning import in_turns
from syncalgos._dtypes import widen
from syncalgos.collectives import _topology as peers
from syncalgos.strategy import WORKERS, Axis, PyTree, Replica, Strategy, factory


class GaslocState(NamedTuple):
    """The start θ of this worker's round, and the last point y before mixing."""

    anchor: PyTree
    ahead: PyTree


@factory
def gasloc(
    period: int = 16,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    *,
    consensus: float = 1.0,
    topology: checks.Symmetric = "ring",
    axis: Axis = WORKERS,
) -> Strategy:
    """GASLoC: outer momentum that also speeds up the mixing with neighbours.

    After every `period` local steps, for worker i's params x that began at θ, and W the
    weights of the graph (in a ring, 1/3 for a worker and for each neighbour):

        y ← θ + η (x - θ);   θ, x ← y + α (W y - y) + γ (y - y of the last sync)

    At the first sync, the last y is the first params.

    Args:
        period: H, local steps between two syncs, at least 1.
        outer_lr: η, the outer learning rate, above 0.
        outer_momentum: γ, the outer momentum, at least 0 and below 1.
        consensus: α, the step towards the neighbours, above 0, at most 1.
        topology: the graph of neighbours; in Python also edges or symmetric weights
            (see `graph`), of which those that change take turns by the sync, not by the
            local step.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: θ and y, shaped like params, at least float32, each worker's
        own. A sync sends y, in float32 at least, to each neighbour. The center is the
        mean of θ. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range, or a graph for a different number of
            workers.

    Replicas do not agree, except on a complete graph without momentum. On any graph,
    the mean of θ moves like the anchor of `diloco`, except that gradients are taken at
    other points. A steady drift moves it η / (1 - γ) times as far as plain averaging.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, gasloc
        >>> model = np.ones(1000, np.float32)
        >>> for workers in (4, 16):
        ...     sent = communication(gasloc(), model, workers=workers, steps=16)
        ...     print(workers, *sent.by_collective, sent.bytes_per_worker)
        4 permute 8000.0
        16 permute 8000.0

    Source: Cagnasso, Belilovsky and Oyallon, "Unifying local communications and local
    updates for LLM pretraining", 2026 (arXiv 2606.11081), by its update alone: the
    paper's own values are not known here, and η and γ are those of DiLoCo.

    Family: Peers instead of all.
    """
    period = checks.whole("period", period, least=1)
    eta, gamma = outer_rates("gasloc", outer_lr, outer_momentum)
    alpha = checks.share("gasloc: consensus", consensus)
    graph = peers.check("gasloc", topology, symmetric=True)

    def init(params: PyTree) -> GaslocState:
        return GaslocState(widen(params), widen(params))

    def mix(y: jax.Array, pull: jax.Array, last_y: jax.Array) -> jax.Array:
        return y + alpha * pull + gamma * (y - last_y)

    def sync(
        replica: Replica, state: GaslocState, step: Any
    ) -> tuple[Replica, GaslocState]:
        moves = pseudo_gradient(state.anchor, replica.params)
        ahead = jax.tree.map(lambda slow, g: slow - eta * g, state.anchor, moves)
        pulls = peers.moves(ahead, graph, step, axis)
        anchor = jax.tree.map(mix, ahead, pulls, state.ahead)
        return restart(replica, anchor), GaslocState(anchor, ahead)

    strategy = Strategy(init, sync=sync, center=shipped("anchor", axis), axis=axis)
    return every(in_turns(graph, strategy), period)
