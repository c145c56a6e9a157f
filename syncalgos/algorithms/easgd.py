"""Elastic averaging SGD."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos._anchors import restart, shipped
from syncalgos._combinators.introspection import Arrival, Combination
from syncalgos._combinators.schedule import every
from syncalgos._dtypes import widen, zeros
from syncalgos.reducers._reducer import over_leaves
from syncalgos.steps import ALWAYS
from syncalgos.strategy import (
    WORKERS,
    Axis,
    OwnGrads,
    PyTree,
    Replica,
    Strategy,
    factory,
)


class EASGDState(NamedTuple):
    """The center c, and the pull, computed before the local step, applied after it."""

    center: PyTree
    pull: PyTree


@factory
def easgd(period: int = 16, beta: float = 0.9, *, axis: Axis = WORKERS) -> Strategy:
    """Elastic averaging SGD: a spring between every replica and a moving center.

    In every `period`-th local step, for N workers' params θ, their inner updates u
    (-η g for SGD), and c that starts at the first params, all at the old values:

        θ ← θ + u - (β / N) (θ - c);   c ← c + β (mean(θ) - c)

    Args:
        period: local steps between two elastic steps, at least 1; 10 in the paper.
        beta: β, N times the elastic rate α, above 0 and at most 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: c, shaped like params, at least float32, identical on all
        workers, and each worker's pull. A sync sends params once. The center is c.
        opt_state and buffers stay local: with momentum it is the paper's EAMSGD.

    Raises:
        ValueError: a parameter outside its range.

    Replicas do not agree: they explore around c. Gradient and spring act at the same
    old θ; an exchange after the local step has a different fixed point. A steady drift
    moves the center N / (N + 1) times as far as plain averaging.

    Example:
        >>> import numpy as np
        >>> from syncalgos import bmuf, communication, easgd
        >>> model = np.ones(10, np.float32)
        >>> for strategy in (easgd(8), bmuf(8)):  # the same bytes
        ...     sent = communication(strategy, model, workers=4, steps=16)
        ...     print(sent.syncs, sent.bytes_per_worker)
        2 120.0
        2 120.0

    Source: Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD",
    NeurIPS 2015, equations 3 and 4.

    Family: Averages of models.
    """
    beta = checks.share("easgd: beta", beta)

    def init(params: PyTree) -> EASGDState:
        return EASGDState(widen(params), zeros(params))

    # reduce sees the old params, sync the new ones. Some published codes exchange after
    # the local step, which has another fixed point; the pull costs one copy of params.
    def reduce(
        grads: PyTree, replica: Replica, state: EASGDState, step: Any
    ) -> tuple[PyTree, EASGDState]:
        alpha = beta / collectives.size(axis)
        params = widen(replica.params)

        def elastic_step(
            c: jax.Array, x: jax.Array, mean: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            return c + beta * (mean - c), alpha * (x - c)

        mean = collectives.mean(params, axis)
        return grads, EASGDState(
            *over_leaves(elastic_step, 2, state.center, params, mean)
        )

    def sync(
        replica: Replica, state: EASGDState, step: Any
    ) -> tuple[Replica, EASGDState]:
        pulled = jax.tree.map(jnp.subtract, widen(replica.params), state.pull)
        return restart(replica, pulled), state

    # The center moves before the local step, in reduce.
    combination = Combination(sync, arrives=(Arrival(ALWAYS, delay=1),))
    strategy = Strategy(
        init, OwnGrads(reduce), combination, shipped("center"), axis=axis
    )
    return every(strategy, period)
