"""Measures of runs: their means over seeds and their paired differences."""

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import zip_longest
from statistics import mean as average
from statistics import stdev
from typing import NamedTuple, TypeVar

import numpy as np

from syncalgos import checks

Key = TypeVar("Key", bound=Hashable)

# Fewer pairs do not show whether their differences are far from normal.
MIN_SEEDS = 5
# The p-value below which a difference counts as seen.
LEVEL = 0.05
# The nominal probability that an interval holds the true mean.
CONFIDENCE = 0.95
# Measures are float32 means: smaller relative differences are rounding errors.
ROUNDING = 1e-6


class Measure(NamedTuple):
    """The measure that a study compares by.

    Attributes:
        key: its name in metrics.jsonl and summary.json.
        name: its name in words.
        higher_is_better: True for an accuracy, False for a loss.
        scale: factor by which a shown value is multiplied, 100 for an accuracy.
        unit: unit of a value when shown: "%", or "" for a loss.
        difference_unit: unit of a difference when shown: "points", or "".
    """

    key: str
    name: str
    higher_is_better: bool
    scale: float = 1.0
    unit: str = ""
    difference_unit: str = ""

    @property
    def side(self) -> int:
        """The factor that makes higher values better."""
        return 1 if self.higher_is_better else -1


ACCURACY = Measure(
    key="test_accuracy",
    name="test accuracy",
    higher_is_better=True,
    scale=100.0,
    unit="%",
    difference_unit="points",
)
LOSS = Measure(key="test_loss", name="test loss", higher_is_better=False)


class Spread(NamedTuple):
    """The distribution of a measure over seeds.

    Attributes:
        mean: the mean over the seeds.
        deviation: standard deviation of the sample (n - 1); None for one seed.
        count: number of seeds.
    """

    mean: float
    deviation: float | None
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]


class Difference(NamedTuple):
    """A paired difference from the baseline over the seeds of both.

    Attributes:
        mean: mean of the differences, each this value minus the baseline's.
        low: lower end of the confidence interval; None for too few seeds.
        high: upper end of the confidence interval; None for too few seeds.
        deviation: standard deviation of the differences; None for one seed.
        count: number of pairs.
        same_sign: whether all differences have the same sign.
        p: probability of a mean at least as far from 0 if there is no true difference;
            None for too few seeds.
    """

    mean: float
    low: float | None
    high: float | None
    deviation: float | None
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    same_sign: bool
    p: float | None = None


class Band(NamedTuple):
    """A metric over a run, as lists of one value per evaluation.

    Attributes:
        mean: the mean over the seeds, unscaled, as in the files; NaN without any value.
        low: mean - standard deviation; the mean itself for one seed.
        high: mean + standard deviation; the mean itself for one seed.
    """

    mean: list[float]
    low: list[float]
    high: list[float]


def choose_measure(
    key: str | None, run_measures: Sequence[Mapping[str, float | None]]
) -> Measure:
    """Returns the measure to compare by.

    Args:
        key: name in summary.json, such as "test_perplexity"; None selects the accuracy
            if the runs have one, otherwise the loss.
        run_measures: the measures of the study's runs that count, by name; none if all
            of them diverged.

    Raises:
        ValueError: the runs lack this measure.
    """
    names: set[str] = set()
    for measures in run_measures:
        names |= measures.keys()
    # A task without an accuracy has None for it. Other figures may be undefined.
    if all(measures.get(ACCURACY.key) is None for measures in run_measures):
        names.discard(ACCURACY.key)
    if key is None:
        return ACCURACY if ACCURACY.key in names else LOSS
    # If all runs diverged, nothing is compared and no name can be checked.
    if run_measures:
        checks.one_of("--measure", key, sorted(names))
    return make_measure(key)


def make_measure(key: str) -> Measure:
    """Returns the measure with a name in summary.json; for most, lower is better."""
    for measure in (ACCURACY, LOSS):
        if measure.key == key:
            return measure
    return Measure(key, key.replace("_", " "), higher_is_better=False)


def find_difference(
    values: Mapping[int, float], baseline: Mapping[int, float]
) -> Difference | None:
    """Returns the mean difference over the common seeds; None without any.

    With 5 pairs or more it has Student's interval. Equal differences other than 0 have
    none, because they show nothing about chance. The result does not depend on the
    order of the seeds, and exchanging both arguments mirrors it.

    For normal differences the interval holds the true mean in 95 % of draws. For
    exponential ones, which are skewed, it does in 88 % of draws of 5 pairs and 90 % of
    10; the bootstrap widened for few pairs does in 87 and 91 %: see
    `python -m benchmarks.harness.intervals`.

    Args:
        values: finite values by seed, without runs that diverged.
        baseline: finite values of the baseline, by seed.

    Raises:
        ValueError: a difference is not finite.

    Source: Student, "The probable error of a mean", Biometrika 1908.
    """
    seeds = values.keys() & baseline.keys()
    if not seeds:
        return None
    # Sorted, so that sums do not depend on the order of the seeds.
    differences = sorted(values[seed] - baseline[seed] for seed in seeds)
    largest = max(max(abs(values[seed]), abs(baseline[seed])) for seed in seeds)
    rounding = ROUNDING * largest
    if max(map(abs, differences)) <= rounding < math.inf:
        differences = [0.0 for _ in differences]
    mean, deviation, count = spread(differences)
    low = None
    high = None
    p = None
    if count >= MIN_SEEDS and deviation is not None:
        if mean == 0:
            low = 0.0
            high = 0.0
            p = 1.0
        error = deviation / math.sqrt(count)  # 0 where tiny differences underflow
        if error and differences[-1] - differences[0] > rounding:
            from scipy.special import stdtr, stdtrit  # what --help must not wait for

            half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error
            p = 2 * float(stdtr(count - 1, -abs(mean / error)))
            low = _without_rounding(mean - half, rounding)
            high = _without_rounding(mean + half, rounding)
    same_sign = len(set(np.sign(differences))) == 1
    return Difference(mean, low, high, deviation, count, same_sign, p)


def _without_rounding(bound: float, rounding: float) -> float:
    """Returns the end of an interval, and 0 if it differs from 0 by rounding alone."""
    # It must not decide a verdict.
    return 0.0 if abs(bound) <= rounding else bound


def correct_p_values(differences: Sequence[Difference | None]) -> list[float | None]:
    """Returns the p-values of a study's comparisons, corrected for their number.

    If there are no true differences, at most 5 % of studies have a p-value below 0.05.

    Args:
        differences: the differences of comparisons that are read together.

    Returns:
        A p-value for each; None for a difference without one, which does not count.

    Source: Holm, "A simple sequentially rejective multiple test procedure",
    Scandinavian Journal of Statistics 1979.
    """
    p_by_position: dict[int, float] = {}
    for position, difference in enumerate(differences):
        if difference is not None and difference.p is not None:
            p_by_position[position] = difference.p
    corrected_by_position = correct_by_holm(p_by_position)
    return [corrected_by_position.get(i) for i in range(len(differences))]


def correct_by_holm(p_by_key: Mapping[Key, float]) -> dict[Key, float]:
    """Returns p-values corrected for their number, with the keys of these.

    Source: as of `correct_p_values`.
    """
    corrected_by_key: dict[Key, float] = {}
    largest = 0.0
    ranked = sorted(p_by_key.items(), key=lambda pair: pair[1])
    for rank, (key, p) in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - rank) * p))
        corrected_by_key[key] = largest
    return corrected_by_key


def band(curves: Sequence[Sequence[float | None]]) -> Band:
    """Returns mean and deviation of curves, by position.

    Args:
        curves: one for each seed, of any lengths: that of a diverged run is shorter.
            Values that are None or not finite do not count.

    Returns:
        A band as long as the longest curve. Where a run ends, the mean continues over
        fewer seeds, and may jump.
    """
    means = []
    low = []
    high = []
    for values in zip_longest(*curves):
        finite = [x for x in values if x is not None and math.isfinite(x)]
        mean = math.nan
        deviation = 0.0
        if finite:
            mean, seed_deviation, _ = spread(finite)
            deviation = seed_deviation or 0.0
        means.append(mean)
        low.append(mean - deviation)
        high.append(mean + deviation)
    return Band(means, low, high)


def spread(values: Sequence[float]) -> Spread:
    """Returns mean and standard deviation; the order of the values does not matter.

    Raises:
        ValueError: there is no value, or one is not finite.
    """
    numbers = [float(value) for value in values]
    if not numbers or not all(map(math.isfinite, numbers)):
        raise ValueError(f"a mean needs one or more finite values, got {numbers}")
    deviation = stdev(numbers) if len(numbers) > 1 else None
    return Spread(average(numbers), deviation, len(numbers))
