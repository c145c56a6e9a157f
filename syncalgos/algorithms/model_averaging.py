"""Periodic model averaging, also called local SGD."""

from syncalgos._combinators.primitives import average
from syncalgos._combinators.schedule import every
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def model_averaging(period: int = 16, *, axis: Axis = WORKERS) -> Strategy:
    """Model averaging (local SGD): average the models every few steps.

    After every `period` local steps, for workers' params θ:

        θ ← mean(θ)

    Args:
        period: local steps between two averages, at least 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. No state. A sync sends params once. The center is the mean of the
        replicas. opt_state and buffers stay local (see `average`, `reset`).

    Raises:
        ValueError: a period that is not a whole number of at least 1.

    With a period of 1 and SGD as the inner optimizer, with or without momentum, this is
    synchronous SGD.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import communication, model_averaging
        >>> for period in (1, 4, 16):
        ...     strategy = model_averaging(period)
        ...     sent = communication(strategy, jnp.ones(1000), workers=8, steps=32)
        ...     print(period, sent.syncs, sent.bytes_per_worker)
        1 32 224000.0
        4 8 56000.0
        16 2 14000.0

    Source: McDonald, Hall and Mann, "Distributed training strategies for the structured
    perceptron", NAACL 2010; Stich, "Local SGD converges fast and communicates little",
    ICLR 2019, algorithm 1.

    Family: Averages of models.
    """
    return every(average(axis=axis), period)
