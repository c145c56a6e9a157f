"""Gossip with a periodic global average."""

from syncalgos import checks
from syncalgos._combinators.chain import chain
from syncalgos._combinators.primitives import average
from syncalgos._combinators.schedule import every, gate
from syncalgos._combinators.turning import in_turns
from syncalgos.algorithms.gossip import mix_field
from syncalgos.collectives import _topology as peers
from syncalgos.steps import Every
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def gossip_pga(
    period: int = 16,
    topology: checks.Topology = "exponential",
    *,
    axis: Axis = WORKERS,
) -> Strategy:
    """Gossip with periodic global averaging.

    After local step t = 0, 1, …, for N workers, modulo N:

        θᵢ ← mean(θ)                             if `period` divides t + 1
        θᵢ ← (θᵢ + θⱼ) / 2,  j = i + 2^(t mod ⌈log₂ N⌉)   else, exponential
        θᵢ ← Σⱼ Wᵢⱼ θⱼ                           else, a graph of weights W

    Args:
        period: local steps between two averages over all workers, at least 1.
        topology: the graph of neighbours at all other steps; exponential is one peer a
            step, in turn. In Python also edges or weights: see `graph`.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. No state. A step sends params to each neighbour; every `period`
        steps, by an all-reduce instead. The center is the mean of the replicas.
        opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    All graphs mix the params after the step; in `gossip`, most graphs mix the params
    from before it. In a ring, a worker and each neighbour have weight 1/3.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, gossip_pga
        >>> model = np.ones(100, np.float32)
        >>> sent = communication(gossip_pga(4), model, workers=8, steps=4)
        >>> np.diff(sent.per_step, prepend=0)
        array([400., 400., 400., 700.])

    Source: Chen et al., "Accelerating gossip SGD with periodic global averaging", ICML
    2021.

    Family: Peers instead of all.
    """
    period = checks.whole("period", period, least=1)
    graph = peers.check("gossip_pga", topology)
    mix_in_turns = in_turns(graph, mix_field(graph, axis))
    # Never both in one step: the average would make the exchange before it useless.
    return chain(
        gate(mix_in_turns, ~Every(period), takes_turns=False),
        every(average(axis=axis), period),
    )
