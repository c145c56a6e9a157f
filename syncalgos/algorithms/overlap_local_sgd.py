"""Overlap local SGD: a pull to an average that was sent a round ago."""

from typing import Any, NamedTuple

import jax

from syncalgos import checks, collectives
from syncalgos._anchors import restart
from syncalgos._combinators.schedule import every
from syncalgos._dtypes import widen, zeros
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    PyTree,
    Replica,
    Strategy,
    factory,
)


class OverlapState(NamedTuple):
    """The anchor z that arrives at the next sync, and its velocity v."""

    anchor: PyTree
    velocity: PyTree


@factory
def overlap_local_sgd(
    period: int = 16,
    pull: float = 0.6,
    anchor_momentum: float = 0.7,
    *,
    axis: Axis = WORKERS,
) -> Strategy:
    """Overlap local SGD: models are pulled to an anchor sent a round ago.

    After every `period` local steps, for workers' params θ, z that starts at the first
    params, and v, 0 at first:

        θ ← θ - α (θ - z);   v ← β v + mean(θ) - z;   z ← z + v, used a round later

    Args:
        period: τ, local steps between two pulls, at least 1.
        pull: α, the share of the way to the anchor, above 0 and at most 1.
        anchor_momentum: β, the momentum of the anchor, at least 0 and below 1; with 0
            the anchor is the last mean.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: z and v, shaped like params, at least float32, identical on
        all workers. A sync sends params once, with a whole round to arrive. The center
        is the mean of the replicas. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    Replicas do not agree. A steady drift moves the center (1 - α) / (1 - α β) times as
    far as plain averaging: 0.69 times with the defaults.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, overlap_local_sgd
        >>> def loss(w, x):
        ...     return ((w - x) ** 2).mean()
        >>> for pull in (0.6, 1.0):
        ...     strategy = overlap_local_sgd(4, pull=pull)
        ...     trainer = DataParallel(loss, optax.sgd(0.1), strategy, workers=4)
        ...     state = trainer.init(jnp.float32(0))
        ...     state, _ = trainer.run(state, jnp.tile(jnp.arange(4.0), (40, 1)))
        ...     print(strategy.late, round(trainer.divergence(state), 2))
        4 0.32
        4 0.0

    Source: Wang, Liang and Joshi, "Overlap local-SGD: an algorithmic approach to hide
    communication delays in distributed SGD", ICASSP 2020.

    Family: Late arrivals.
    """
    pull = checks.share("overlap_local_sgd: pull", pull)
    momentum = checks.real(
        "overlap_local_sgd: anchor_momentum", anchor_momentum, least=0, below=1
    )

    def init(params: PyTree) -> OverlapState:
        return OverlapState(widen(params), zeros(params))

    # In units of params. The authors' code keeps v in units of the learning rate, and
    # first syncs after period + 1 local steps.
    def follow(
        z: jax.Array, v: jax.Array, mean: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        v = momentum * v + mean - z
        return z + v, v

    def sync(
        replica: Replica, state: OverlapState, step: Any
    ) -> tuple[Replica, OverlapState]:
        collectives.no_mean("a pull to an anchor")
        params = widen(replica.params)
        pulled = jax.tree.map(lambda x, z: x - pull * (x - z), params, state.anchor)
        replica = restart(replica, pulled)
        mean = collectives.mean(widen(replica.params), axis)
        return replica, OverlapState(*over_leaves(follow, 2, *state, mean))

    strategy = Strategy(init, sync=sync, center=MeanCenter(axis), late=period)
    return every(strategy, period)
