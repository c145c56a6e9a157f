"""FedProx: model averaging with a pull to the last average."""

from typing import Any, NamedTuple

import jax

from syncalgos import checks, collectives
from syncalgos._combinators.schedule import sync_every
from syncalgos._dtypes import narrow, widen
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


class FedProxState(NamedTuple):
    """The anchor x."""

    anchor: PyTree


@factory
def fedprox(
    period: int = 16, proximal: float = 0.01, *, axis: Axis = WORKERS
) -> Strategy:
    """FedProx: model averaging of local losses with a proximal term, (μ / 2) |θ - x|².

    At every local step, for gradients g and params θ that began at x, and after every
    `period` of them:

        g ← g + μ (θ - x)
        x, θ ← mean(θ)

    Args:
        period: local steps of a round, at least 1.
        proximal: μ, the strength of the pull, above 0; published values go from 0.001
            to 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x, shaped like params, at least float32, identical on all
        workers. A sync sends params once. The center is the mean of the replicas.
        opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    A steady drift moves the center (1 - (1 - μ lr)^H) / (H μ lr) times as far as plain
    averaging in H = `period` steps of SGD. An inner optimizer that normalizes
    gradients, such as Adam, also normalizes the pull.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, fedprox
        >>> def loss(w, x):
        ...     return ((w - x) ** 2).mean()
        >>> for strategy in (fedprox(proximal=0.01), fedprox(proximal=1.0)):
        ...     trainer = DataParallel(loss, optax.sgd(0.1), strategy, workers=4)
        ...     state = trainer.init(jnp.float32(0))
        ...     state, _ = trainer.run(state, jnp.tile(jnp.arange(4.0), (15, 1)))
        ...     print(round(trainer.divergence(state), 2))
        1.07
        0.74

    Source: Li et al., "Federated optimization in heterogeneous networks", MLSys 2020
    (2018), algorithm 2, all workers.

    Family: Against drift.
    """
    proximal = checks.real("fedprox: proximal", proximal, above=0)

    def init(params: PyTree) -> FedProxState:
        return FedProxState(widen(params))

    def pull(g: jax.Array, x: jax.Array, anchor: jax.Array) -> jax.Array:
        return g + proximal * (x - anchor)

    def reduce(
        grads: PyTree, replica: Replica, state: FedProxState, step: Any
    ) -> tuple[PyTree, FedProxState]:
        pulled = jax.tree.map(pull, widen(grads), widen(replica.params), state.anchor)
        return narrow(pulled, grads), state

    def sync(
        replica: Replica, state: FedProxState, step: Any
    ) -> tuple[Replica, FedProxState]:
        # Averaged in the params' own dtype: then x is exactly the point from which they
        # restart.
        params = collectives.mean(replica.params, axis)
        return replica._replace(params=params), FedProxState(widen(params))

    return sync_every(Strategy(init, OwnGrads(reduce), sync, MeanCenter(axis)), period)
