"""Means over seeds and paired differences."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import mean as average
from statistics import stdev
from typing import NamedTuple

import numpy as np

MIN_SEEDS = 5  # pairs; of fewer a bootstrap has too few different resamples
RESAMPLES = 9999
ROUNDING = 1e-6  # of the figures, which are float32 means: less is no difference


class Spread(NamedTuple):
    """Of several seeds.

    Attributes:
        mean: over the seeds.
        deviation: the standard deviation (of a sample: n - 1); None for one seed.
        count: seeds.
    """

    mean: float
    deviation: float | None
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]


class Difference(NamedTuple):
    """A paired difference, this minus the baseline, over seeds that both have.

    Attributes:
        mean: of the differences.
        low: end of the confidence interval; None where there are too few seeds.
        high: the other end.
        deviation: standard deviation of the differences; None for one seed.
        count: pairs.
        same_sign: whether all differences have one sign.
    """

    mean: float
    low: float | None
    high: float | None
    deviation: float | None
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    same_sign: bool


def spread(values: Sequence[float]) -> Spread:
    """The mean and the sample's standard deviation, exact in any order of the seeds.

    Raises:
        ValueError: there is no value, or one is not finite.
    """
    figures = [float(x) for x in values]
    if not figures or not all(map(math.isfinite, figures)):
        raise ValueError(f"a mean needs finite values, one or more, got {figures}")
    deviation = stdev(figures) if len(figures) > 1 else None
    return Spread(average(figures), deviation, len(figures))


def paired(
    values: Mapping[int, float],
    baseline: Mapping[int, float],
    confidence: float = 0.95,
) -> Difference | None:
    """The mean difference over the seeds that both have; None if there are none.

    The interval is the bootstrap's percentile one, widened for few seeds, from 5 pairs
    on; of equal differences it is their mean alone. The same figures give the same one
    in any order, and its mirror image when the two change places.

    Without widening, a "95 %" interval of few pairs is too narrow: of 5 normal
    differences, BCa's and the plain percentile one hold the true mean in 84 % of draws.
    So the percentiles are those at which a normal interval would be as wide as
    Student's. This one holds the true mean in 92.2 % of draws of 5 pairs, 94.0 % of 8,
    94.4 % of 10 and 94.7 % of 20. At 5 no bootstrap of the mean can pass 93.75 %: its
    ends lie within the differences, all on one side of the true mean in 1 draw of 16.

    Args:
        values: finite figures by seed; runs that diverged are left out.
        baseline: as values.
        confidence: nominal probability that the interval holds the true mean.

    Raises:
        ValueError: a difference is not finite, or confidence not between 0 and 1.

    Source: Hesterberg, "What teachers should know about the bootstrap", The American
    Statistician 2015 (there the expanded percentile interval).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    seeds = values.keys() & baseline.keys()
    if not seeds:
        return None
    differences = sorted(values[seed] - baseline[seed] for seed in seeds)
    mean, deviation, count = spread(differences)
    largest = max(max(abs(values[s]), abs(baseline[s])) for s in seeds)
    if max(map(abs, differences)) <= ROUNDING * largest:
        differences = [0.0 for _ in differences]
        mean, deviation, count = spread(differences)
    low = high = None
    if count >= MIN_SEEDS:
        low = high = mean
        if differences[-1] - differences[0] > ROUNDING * largest:
            found = _bootstrap(differences, mean, confidence)
            # An end that is 0 but for rounding must not decide a verdict.
            low, high = (0.0 if abs(x) <= ROUNDING * largest else x for x in found)
    same_sign = len(set(np.sign(differences))) == 1
    return Difference(mean, low, high, deviation, count, same_sign)


def _bootstrap(
    differences: list[float], mean: float, confidence: float
) -> tuple[float, float]:
    """The widened percentile interval; of a negative mean as of its mirror image."""
    from scipy.stats import bootstrap, norm, t  # slow to import

    count = len(differences)
    student = t.ppf((1 + confidence) / 2, count - 1)
    # resamples deviate by √((n-1)/n) of what a sample of n tells of its population
    tail = norm.cdf(-math.sqrt(count / (count - 1)) * student)
    side = math.copysign(1, mean)
    width = differences[-1] - differences[0]  # a unit in which no square overflows
    sample = np.sort(side * (np.array(differences) - mean) / width)
    found = bootstrap(
        (sample,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=1 - 2 * float(tail),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    low, high = sorted(mean + side * width * float(end) for end in found)
    return low, high


def band(
    curves: Sequence[Sequence[float | None]],
) -> tuple[list[float], list[float], list[float]]:
    """Mean, mean - deviation and mean + deviation of curves, by position.

    Args:
        curves: one for each seed, of any length, such as a diverged run's shorter one.
            What is None or not finite does not count.

    Returns:
        Three lists as long as the longest curve: of the seeds that have a figure there,
        NaN where none has, the mean itself where one has. Where a run ends, the mean
        goes on over fewer seeds, and may jump.
    """
    mean, low, high = [], [], []
    for figures in zip_longest(*curves):
        known = [x for x in figures if x is not None and math.isfinite(x)]
        found = spread(known) if known else Spread(math.nan, None, 0)
        mean.append(found.mean)
        low.append(found.mean - (found.deviation or 0))
        high.append(found.mean + (found.deviation or 0))
    return mean, low, high
