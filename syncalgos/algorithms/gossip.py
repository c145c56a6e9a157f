"""Gossip: every worker averages with its neighbours only."""

from typing import Any

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._anchors import restart
from syncalgos._combinators.chain import chain
from syncalgos._combinators.turning import in_turns
from syncalgos._dtypes import zeros
from syncalgos._optax_states import check_mean
from syncalgos.collectives import _topology as peers
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    OwnGrads,
    PyTree,
    Replica,
    Strategy,
    factory,
)


@factory
def gossip(
    topology: checks.Topology = "exponential",
    *,
    mix_opt_state: bool = False,
    axis: Axis = WORKERS,
) -> Strategy:
    """Gossip: at every local step, each worker averages with its neighbours.

    exponential: after local step t, for N workers, modulo N:

        θᵢ ← (θᵢ + θⱼ) / 2,   j = i + 2^(t mod ⌈log₂ N⌉)

    any other graph (D-PSGD): in the local step, from the old params θ, with the graph's
    weights W (in a ring, 1/3 for a worker and for each neighbour) and the inner update
    u:

        θᵢ ← Σⱼ Wᵢⱼ θⱼ + uᵢ

    Args:
        topology: the graph of neighbours; exponential is one peer a step, in turn. In
            Python also edges or weights: see `graph`.
        mix_opt_state: average the floats of the inner optimizer's state, such as its
            momentum, with the same neighbours after the step.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: none for the exponential graph, else the change of params by
        mixing, shaped like params. A step sends params to each neighbour, and with
        mix_opt_state the floats of opt_state too. The center is the mean of the
        replicas. buffers stay local, and so does opt_state without mix_opt_state.

    Raises:
        ValueError: an unknown graph, or a graph for a different number of workers.

    Replicas do not agree. Without training, the exponential graph of 2ᵏ workers reaches
    the exact mean in k steps.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, gossip
        >>> model = np.ones(100, np.float32)
        >>> for graph in ("exponential", "ring"):
        ...     strategy = gossip(topology=graph)
        ...     sent = communication(strategy, model, workers=8, steps=1)
        ...     print(graph, sent.bytes_per_worker, strategy.late)
        exponential 400.0 0
        ring 800.0 1

    Source: Ying et al., "Exponential graph is provably efficient for decentralized deep
    training", NeurIPS 2021, which mixes momentum too; ring: Lian et al., "Can
    decentralized algorithms outperform centralized algorithms?", NeurIPS 2017,
    algorithm 1.

    Family: Peers instead of all.
    """
    graph = peers.check("gossip", topology)
    if peers.has_name(graph, "exponential"):
        mix_params = mix_field(graph, axis)
    else:
        mix_params = _mix_during_step(graph, axis)
    strategy = in_turns(graph, mix_params)
    if not mix_opt_state:
        return strategy
    mix_state = mix_field(graph, axis, "opt_state")._replace(late=strategy.late)
    return chain(strategy, in_turns(graph, mix_state))


def mix_field(graph: peers.Topology, axis: Axis, field: str = "params") -> Strategy:
    """Mixes one field of the replica with the neighbours' at each sync."""

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
        if field == "opt_state":
            check_mean(replica.opt_state)
        value = peers.mix(getattr(replica, field), graph, step, axis)
        return replica._replace(**{field: value}), state

    return Strategy(sync=sync, center=MeanCenter(axis))


def _mix_during_step(graph: peers.Topology, axis: Axis) -> Strategy:
    # D-PSGD mixes the params from before the step; they are sent during the step. Only
    # reduce sees them.
    def reduce(
        grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        return grads, peers.moves(replica.params, graph, step, axis)

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
        return restart(replica, jax.tree.map(jnp.add, replica.params, state)), state

    return Strategy(zeros, OwnGrads(reduce), sync, MeanCenter(axis), late=1)
