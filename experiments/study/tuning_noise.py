"""The chance of tuning: what other tuning seeds would have chosen, and how good it is.

A difference between two tuned algorithms rests on the reported seeds and on the seeds
that chose their values. Half of the tuning seeds, drawn at random, chooses a value, and
the other half scores it, so that a value does not look better than it is on the seeds
that chose it. How far the score is from that of the reported value, a *shift*, may have
either sign. Both scores are means over the draws that chose the value.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.study.statistics import CONFIDENCE, Difference

DRAWS = 2000
BISECTIONS = 60
FAR = 50  # standard errors beyond which an end is not looked for


class TuningInterval(NamedTuple):
    """The 95 % interval of a difference that includes the chance of tuning.

    Attributes:
        low, high: its ends.
    """

    low: float
    high: float


def find_shifts(scores: np.ndarray, losses: np.ndarray, chosen: int) -> np.ndarray:
    """Returns how much better other choices are than the reported one, (draws,).

    Args:
        scores: of each value and tuning seed, (values, seeds); higher is better.
        losses: of the same shape; the lower decides between equal scores.
        chosen: the position of the reported value.
    """
    num_values, num_seeds = scores.shape
    orders = np.tile(np.arange(num_seeds), (DRAWS, 1))
    orders = np.random.default_rng(0).permuted(orders, axis=1)
    choosing_seeds = orders[:, : num_seeds // 2]
    scoring_seeds = orders[:, num_seeds // 2 :]
    choosing_scores = scores[:, choosing_seeds].mean(axis=2).round(6)
    choosing_losses = losses[:, choosing_seeds].mean(axis=2)
    choosing_losses[choosing_scores < choosing_scores.max(axis=0)] = np.inf
    choices = choosing_losses.argmin(axis=0)  # (draws,)
    draw_scores = scores[:, scoring_seeds].mean(axis=2)  # (values, draws)
    honest_scores = scores.mean(axis=1)
    for value in range(num_values):
        is_choice = choices == value
        if is_choice.any():
            honest_scores[value] = draw_scores[value, is_choice].mean()
    return honest_scores[choices] - honest_scores[chosen]


def probability_below(
    difference: Difference, shifts: np.ndarray, threshold: float
) -> float:
    """Returns how probable it is that the true difference is below a threshold.

    Args:
        difference: the difference of the reported seeds, with an interval.
        shifts: those of the row minus those of its baseline, (draws,).
        threshold: in the unit of the difference.
    """
    from scipy.special import stdtr  # what --help must not wait for

    error = (difference.deviation or 0.0) / math.sqrt(difference.count)
    # Many draws choose alike.
    unique_shifts, counts = np.unique(shifts, return_counts=True)
    distances = threshold - difference.mean - unique_shifts
    if error == 0:
        probabilities = (distances > 0).astype(float)
    else:
        probabilities = stdtr(difference.count - 1, distances / error)
    return float(np.average(probabilities, weights=counts))


def find_interval(
    difference: Difference | None, row: Sequence[float], base: Sequence[float]
) -> TuningInterval | None:
    """Returns the 95 % interval of a difference that includes the chance of tuning.

    Args:
        difference: the difference of two rows.
        row, base: their shifts.

    Returns:
        None without an interval of the difference, or if a row has no shifts.
    """
    if difference is None or difference.low is None or not (len(row) and len(base)):
        return None
    shifts = np.subtract(row, base)
    error = (difference.deviation or 0.0) / math.sqrt(difference.count)
    ends = []
    for probability in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2):
        low = difference.mean + shifts.min() - FAR * error
        high = difference.mean + shifts.max() + FAR * error
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if probability_below(difference, shifts, middle) < probability:
                low = middle
            else:
                high = middle
        # Further digits differ between processors, whose sums have other orders.
        ends.append(float(f"{high:.6g}"))
    return TuningInterval(*ends)
