"""QG-DSGDm: gossip with a momentum of the mixed models' moves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._combinators import introspection
from syncalgos._combinators.turning import CountedTurns
from syncalgos._dtypes import narrow, widen, zeros
from syncalgos.collectives import _topology as peers
from syncalgos.collectives._graphs import changes
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


class QuasiGlobalState(NamedTuple):
    """The quasi-global momentum m, and the params x before the step."""

    momentum: PyTree
    before: PyTree


@factory
def qg_dsgdm(
    local_momentum: float = 0.9,
    decay: float = 0.9,
    *,
    nesterov: bool = True,
    topology: checks.Topology = "ring",
    learning_rate: checks.LearningRate,
    axis: Axis = WORKERS,
) -> Strategy:
    """QG-DSGDm: gossip with a momentum of the models' moves after mixing.

    At every local step, for worker i's gradients g at params x, its momentum m, zero at
    first, W the weights of the graph (in a ring, 1/3 for a worker and for each
    neighbour), and the learning rate η:

        d ← β m + g;   nesterov: d ← g + β d
        y ← x - η d;   xᵢ⁺ ← Σⱼ Wᵢⱼ yⱼ;   m ← μ m + (1 - μ) (x - x⁺) / η

    Args:
        local_momentum: β, in place of the inner optimizer's; at least 0 and below 1.
        decay: μ, the decay of m, at least 0 and below 1.
        nesterov: whether to step along g + β d; else the step is along d.
        topology: the graph of neighbours; in Python also edges or weights: see `graph`.
        learning_rate: η, the inner optimizer's at each local step: a number above 0
            or a schedule.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: m and x, shaped like params, at least float32, each worker's
        own. A step sends params to each neighbour. The center is the mean of the
        replicas. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter out of range, or a graph for a different number of
            workers.

    Replicas do not agree. m holds the moves of neighbours too: a worker whose data
    differ strays less. The inner optimizer is SGD without momentum. At η = 0, m stays.
    A steady drift goes 1 / (1 - β) times as far as plain averaging takes it.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, qg_dsgdm
        >>> strategy = qg_dsgdm(learning_rate=0.1, topology="torus")
        >>> model = np.ones(100, np.float32)
        >>> sent = communication(strategy, model, workers=16, steps=1)
        >>> sent.bytes_per_worker / model.nbytes  # to four neighbours
        4.0

    Source: Lin, Karimireddy, Stich and Jaggi, "Quasi-global momentum: accelerating
    decentralized deep learning on heterogeneous data", ICML 2021; the authors' code.

    Family: Peers instead of all.
    """
    beta = checks.real("qg_dsgdm: local_momentum", local_momentum, least=0, below=1)
    mu = checks.real("qg_dsgdm: decay", decay, least=0, below=1)
    graph = peers.check("qg_dsgdm", topology)
    rate = checks.learning_rate("qg_dsgdm", learning_rate)

    def init(params: PyTree) -> QuasiGlobalState:
        return QuasiGlobalState(zeros(params), widen(params))

    def find_direction(g: jax.Array, m: jax.Array) -> jax.Array:
        d = beta * m + g
        return g + beta * d if nesterov else d

    def reduce(
        grads: PyTree, replica: Replica, state: QuasiGlobalState, step: Any
    ) -> tuple[PyTree, QuasiGlobalState]:
        directions = jax.tree.map(find_direction, widen(grads), state.momentum)
        return narrow(directions, grads), state._replace(before=widen(replica.params))

    def sync(
        replica: Replica, state: QuasiGlobalState, step: Any
    ) -> tuple[Replica, QuasiGlobalState]:
        params = peers.mix(replica.params, graph, step, axis)
        eta = rate(step)
        # A schedule may end at 0: then moves cannot be measured in units of it.
        share = jnp.where(eta > 0, 1 - mu, 0)
        unit = jnp.where(eta > 0, eta, 1)

        def follow(m: jax.Array, x: jax.Array, mixed: jax.Array) -> jax.Array:
            return m + share * ((x - mixed) / unit - m)

        momentum = narrow(jax.tree.map(follow, *state, widen(params)), state.momentum)
        return replica._replace(params=params), state._replace(momentum=momentum)

    # Under a period the rate and the graph would need two clocks.
    turning_sync = sync
    if changes(graph):
        turning_sync = introspection.Combination(sync, turns=CountedTurns())
    return Strategy(
        init,
        OwnGrads(reduce),
        turning_sync,
        MeanCenter(axis),
        own_momentum=True,
        learning_rate=learning_rate,
    )
