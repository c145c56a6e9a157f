"""LoCo: low-bit gradients with averaged errors fed back."""

from typing import Literal

from syncalgos import reducers
from syncalgos._combinators.primitives import reduce_with
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def loco(
    bits: Literal[8, 4, 2] = 4,
    beta: float = 0.8,
    *,
    reset_period: int = 1024,
    axis: Axis = WORKERS,
) -> Strategy:
    """LoCo: gradients in few bits, with a moving average of rounding errors fed back.

    At every local step, for worker i's gradients g and its residual e, the residual ē
    of the worker that averages a part, both 0 at first, and Q rounding to the nearest
    of 2^bits - 1 levels up to ± the largest |x| of a block of at most 512 entries:

        x ← g + e;   d ← Q(x);   e ← β e + (1 - β) (x - d)
        y ← mean(d) + ē;   g ← Q(y);   ē ← β ē + (1 - β) (y - g)
        after every T local steps, instead: e, ē ← 0

    Args:
        bits: 8, 4 or 2 bits per entry.
        beta: β, the decay of the residuals, at least 0 and below 1.
        reset_period: T, local steps between two resets of the residuals, at least 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: e, shaped like params, and ē of the part that the worker
        averages, each worker's own, at least float32. A step sends every entry twice,
        in `bits` bits, and a scale per 512 entries or fewer. Replicas stay identical.

    Raises:
        ValueError: a parameter outside its range.

    This is error feedback at a gain of 1 - β: it makes up for losses 1 / (1 - β) times
    as late. Losses not yet made up for at a reset are dropped. The paper keeps e in 8
    bits.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, loco
        >>> model = np.ones(8000, np.float32)
        >>> sent = communication(loco(bits=4), model, workers=2, steps=1)
        >>> sent.bytes_per_worker, [*sent.by_collective]
        (4064.0, ['all_gather', 'all_to_all'])

    Source: Xie, Lin, Toh and Zhou, "LoCo: low-bit communication adaptor for large-scale
    model training", TPAMI 2025 (2024).

    Family: Compressed gradients.
    """
    # Errors are float32; in DeepSpeed they have 8 bits. The second rounding applies to
    # the mean sent to all workers; DeepSpeed sums inside a host before it rounds.
    rounded = reducers.low_bit(bits, beta=beta, reset_period=reset_period)
    return reduce_with(rounded, axis=axis)
