"""Distributed Lion: signs of each worker's own momentum, voted on or averaged."""

from typing import Any

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives, reducers
from syncalgos._dtypes import if_finite, narrow, widen, zeros
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    PyTree,
    Replica,
    Strategy,
    factory,
)


@factory
def distributed_lion(
    b1: float = 0.9,
    b2: float = 0.99,
    *,
    majority: bool = False,
    seed: int = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """Distributed Lion: the signs of workers' own momentum, averaged or voted on.

    At every local step, for worker i's gradients g and its momentum m, 0 at first,
    where the sign of 0 is drawn:

        d ← sign(β₁ m + (1 - β₁) g);   m ← β₂ m + (1 - β₂) g
        g ← mean(d), or with `majority`: g ← sign(Σ d)

    Args:
        b1: β₁, the share of momentum in the direction, at least 0 and below 1.
        b2: β₂, the decay of the momentum, at least 0 and below 1.
        majority: whether to step along the sign of most workers; else the step is along
            their mean sign.
        seed: seeds the random signs of 0 and of ties.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: m, shaped like params, at least float32, each worker's own. A
        step sends one bit per entry by all-to-all, then one bit, or one byte of the
        mean, by all-gather, and one number by all-reduce: a gradient that is not finite
        makes all results NaN. Replicas stay identical.

    Raises:
        ValueError: a parameter outside its range.

    The inner optimizer is plain SGD, with Lion's weight decay. Entries move by at most
    the learning rate, whatever the gradient: use Lion's learning rate, about a hundred
    times smaller than SGD's. In the published code, the sign of 0 is -, which moves
    entries without a gradient by the learning rate at every step.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, distributed_lion
        >>> model = np.ones(8000, np.float32)
        >>> for majority in (False, True):
        ...     strategy = distributed_lion(majority=majority)
        ...     sent = communication(strategy, model, workers=2, steps=1)
        ...     print(majority, sent.bytes_per_worker)
        False 4504.0
        True 1004.0

    Source: Liu et al., "Communication efficient distributed training with Distributed
    Lion", NeurIPS 2024, algorithm 1.

    Family: Compressed gradients.
    """
    b1 = checks.real("distributed_lion: b1", b1, least=0, below=1)
    b2 = checks.real("distributed_lion: b2", b2, least=0, below=1)
    # A sign of 0 is drawn: taken as + or -, as in published codes, it would move leaves
    # without a gradient by the learning rate at every step.
    if majority:
        votes = reducers.sign(majority=True, seed=seed, axis=axis)
    else:
        votes = reducers.tally(seed=seed, axis=axis)

    def mix(share: float, momentum: PyTree, grads: PyTree) -> PyTree:
        return jax.tree.map(
            lambda m, g: share * m + (1 - share) * g, momentum, widen(grads)
        )

    def reduce(
        grads: PyTree, replica: Replica, momentum: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        signs, _, _ = votes.combine(mix(b1, momentum, grads), (), step)
        # Signs hide values that are not finite: one more number tells all workers.
        spoiler = if_finite(grads, jnp.float32(0), jnp.float32(jnp.nan))
        spoiler = collectives.mean(spoiler, axis)
        combined = jax.tree.map(lambda x: x + spoiler.astype(x.dtype), signs)
        new_momentum = if_finite(combined, mix(b2, momentum, grads), momentum)
        return narrow(combined, grads), new_momentum

    return Strategy(zeros, reduce, center=MeanCenter(axis), unit_steps=True)
