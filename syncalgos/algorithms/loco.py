"""LoCo: low-bit gradients with averaged errors fed back."""

from typing import Literal

from syncalgos import reducers
from syncalgos.collectives import WORKERS, Axis
from syncalgos.combinators.primitives import reduce_with
from syncalgos.strategy import Strategy


def loco(
    bits: Literal[8, 4, 2] = 4,
    beta: float = 0.8,
    reset_period: int = 1024,
    axis: Axis = WORKERS,
) -> Strategy:
    """LoCo: gradients in few bits, whose rounding is fed back as a moving average.

    At every local step, for worker i's gradients g and its residual e, ē on the worker
    that averages a part, and Q rounding to the nearest of 2^bits - 1 levels:

        x ← g + e;   d ← Q(x);   e ← β e + (1 - β) (x - d)
        y ← mean(d) + ē;   g ← Q(y);   ē ← β ē + (1 - β) (y - g)

    After every `reset_period` local steps e and ē are 0.

    Args:
        bits: 8, 4 or 2 bits per entry.
        beta: β, the share of old residuals that is kept, at least 0 and below 1.
        reset_period: T, local steps between two resets of the residuals, at least 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: e, shaped like params, and ē of the part that the worker
        averages, both its own, at least float32. A step sends every entry twice, at so
        many bits, and a scale for each 512 entries or less. Replicas stay equal.

    Raises:
        ValueError: a parameter outside its range.

    It is error feedback at a gain of 1 - β: what was lost comes 1 / (1 - β) times as
    late, and what has not come by a reset never does. The paper keeps e in 8 bits.

    Source: Xie, Lin, Toh and Zhou, "LoCo: low-bit communication adaptor for large-scale
    model training", TPAMI 2025 (2024).
    """
    return reduce_with(reducers.low_bit(bits, beta, reset_period, axis), axis)
