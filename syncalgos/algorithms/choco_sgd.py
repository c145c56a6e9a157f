"""CHOCO-SGD: gossip of compressed changes."""

from typing import Any, NamedTuple

import jax

from syncalgos import checks
from syncalgos._dtypes import widen, zeros
from syncalgos.collectives import _topology as peers
from syncalgos.reducers import _stacking
from syncalgos.reducers._reducer import is_sent, over_leaves
from syncalgos.reducers._sparse import choose_largest, place_values
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    PyTree,
    Replica,
    Strategy,
    factory,
)


class ChocoState(NamedTuple):
    """The copy x̂ of this worker's params that its neighbours hold, and W x̂ - x̂."""

    known: PyTree
    apart: PyTree


@factory(static=["density"])
def choco_sgd(
    density: float = 0.1,
    consensus: float | None = None,
    topology: checks.Symmetric = "ring",
    *,
    layered: _stacking.Layered = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """CHOCO-SGD: gossip that sends only the largest changes.

    After every local step, for worker i's params θ, the copy x̂ of them that its
    neighbours hold, and W the weights of the graph (1/3 each in a ring):

        q ← TopK(θ - x̂);   x̂ ← x̂ + q;   θ ← θ + γ (W x̂ - x̂)

    Args:
        density: the share of a leaf that is sent, rounded up; above 0, at most 1.
        consensus: γ, the step towards the neighbours, above 0, at most 1; None means 2
            × density, at most 1.
        topology: the graph of neighbours; in Python also edges, or symmetric weights:
            see `graph`.
        layered: which leaves hold several layers, each sent as a leaf (see `Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x̂ and W x̂ - x̂, shaped like params, at least float32, each
        worker's own. A step sends the values of q and their indices to each neighbour;
        an index has 16 bits in leaves of at most 65,536 entries, else 32. The center is
        the mean of the replicas. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter out of range, or a graph for a different number of
            workers.

    Replicas do not agree. Mixing keeps their mean, whatever the compression loses. With
    γ above 4 × density, replicas may drift apart permanently. x̂ starts at the params,
    which are identical on all workers; in the paper it starts at 0.

    Example:
        >>> import numpy as np
        >>> from syncalgos import choco_sgd, communication
        >>> model, strategy = np.ones(1000, np.float32), choco_sgd(density=0.01)
        >>> sent = communication(strategy, model, workers=8, steps=1)
        >>> sent.bytes_per_worker  # to each neighbour 10 values and their indices
        120.0

    Source: Koloskova, Stich and Jaggi, "Decentralized stochastic optimization and
    gossip algorithms with compressed communication", ICML 2019, algorithm 2.

    Family: Peers instead of all.
    """
    density = checks.density("choco_sgd", density)
    # An entry waits 1 / density steps to be sent. Without gradients but with noise 4, 8
    # and 16 workers stayed together up to γ = 0.4 at a density of 0.1, 0.05 at 0.01.
    gamma = min(1.0, 2 * density) if consensus is None else consensus
    gamma = checks.share("choco_sgd: consensus", gamma)
    graph = peers.check("choco_sgd", topology, fixed=True, symmetric=True)
    layered = _stacking.check_layered("choco_sgd: layered", layered)

    # From 0 the params themselves would have to be sent first.
    def init(params: PyTree) -> ChocoState:
        return ChocoState(widen(params), zeros(params))

    # `pull` is W x̂ - x̂.
    def mix_piece(
        x: jax.Array, x_hat: jax.Array, pull: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        message = choose_largest(x.astype(x_hat.dtype) - x_hat, density)
        (links,) = peers.links(graph, axis)
        messages = [message, *(peers.hear(message, link, axis) for link in links)]
        q, *peer_changes = (
            place_values(values, indices, x_hat) for values, indices in messages
        )
        x_hat = x_hat + q
        pull = pull + peers.pull(q, peer_changes, links, axis)
        return (x + gamma * pull).astype(x.dtype), x_hat, pull

    def mix_leaf(
        x: jax.Array, x_hat: jax.Array, pull: jax.Array, pieces: _stacking.Pieces
    ) -> tuple[jax.Array, ...]:
        if not is_sent(x):
            return x, x_hat, pull
        mixed = pieces.map(mix_piece)(*map(pieces.split, (x, x_hat, pull)))
        return tuple(map(pieces.join, mixed))

    def sync(
        replica: Replica, state: ChocoState, step: Any
    ) -> tuple[Replica, ChocoState]:
        pieces = _stacking.pieces_like(layered, replica.params)
        params, *new_state = over_leaves(mix_leaf, 3, replica.params, *state, pieces)
        return replica._replace(params=params), ChocoState(*new_state)

    return Strategy(init, sync=sync, center=MeanCenter(axis))
