"""SPARTA: average a few random entries of the models, often."""

from typing import Any

import jax

from syncalgos import collectives, reducers
from syncalgos._combinators.schedule import every
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    PyTree,
    Replica,
    Strategy,
    factory,
)


@factory(static=["density"])
def sparta(
    density: float = 0.005, period: int = 1, *, seed: int = 0, axis: Axis = WORKERS
) -> Strategy:
    """SPARTA: sparse averaging of a few entries of the models, drawn anew each time.

    After every `period` local steps, for workers' params θ and random entries M,
    identical on all workers:

        θ[M] ← mean(θ[M])

    Args:
        density: the share of each leaf's entries in M, rounded up; above 0, at most 1.
        period: local steps between two averages, at least 1.
        seed: seeds M, identical on all workers.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. No state. A sync sends the values of the entries once, without
        indices. The center is the mean of the replicas. opt_state and buffers stay
        local.

    Raises:
        ValueError: a parameter outside its range.

    Replicas do not agree: an entry is averaged about once in 1 / density syncs. The
    authors' code draws each entry independently, with this probability. Here the number
    of entries is fixed, as arrays in JAX need fixed shapes.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, sparta
        >>> model = np.ones(1000, np.float32)
        >>> sent = communication(sparta(density=0.005), model, workers=2, steps=1)
        >>> sent.bytes_per_worker / model.nbytes
        0.005

    Source: Baioumy and Cheema, "SPARTA: distributed training with sparse parameter
    averaging", 2025; EXO Gym.

    Family: Little at a time.
    """
    entries = reducers.random_k(density, seed=seed, axis=axis)

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
        collectives.no_mean("a mean of some entries")
        means, sent_entries, _ = entries.combine(replica.params, (), step)
        # Both are zero outside of M, which stays the reducer's own.
        params = jax.tree.map(
            lambda x, entry, mean: x - entry + mean, replica.params, sent_entries, means
        )
        return replica._replace(params=params), state

    return every(Strategy(sync=sync, center=MeanCenter(axis)), period)
