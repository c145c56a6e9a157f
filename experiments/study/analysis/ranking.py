"""The rows that are compared: their standing to the best, and to a target near it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.study.analysis.formatting import PHRASES
from experiments.study.analysis.results import Curve, Row
from experiments.study.statistics import (
    LEVEL,
    ROUNDING,
    Difference,
    Measure,
    corrected,
    paired,
)

FINDINGS = PHRASES["standing"]
# Distance of the default target from the baseline: shares of an accuracy, and a loss.
SHARES = {True: 0.01, False: 0.05}


class Ranking(NamedTuple):
    """Rows by their standing to the best of them.

    Attributes:
        rows: all, in the order of --algos.
        top: the best; None where all runs diverged.
        kinds: the others by standing, in the order of FINDINGS.
        comparisons: how many p-values were corrected for.
    """

    rows: Sequence[Row]
    top: Row | None
    kinds: Mapping[str, Sequence[Row]]
    comparisons: int


def ranked(rows: Sequence[Row], by: Measure) -> Ranking:
    """Ranks rows by the differences of their final measures to the best."""
    return rankings({"": rows}, by)[""]


def rankings(points: Mapping[str, Sequence[Row]], by: Measure) -> dict[str, Ranking]:
    """Ranks the rows at each value of a sweep.

    The data choose the best, so p-values are corrected over all pairs of rows.
    """
    tops = {point: leader(rows, by) for point, rows in points.items()}
    pairs = [
        (point, row, row.to_best or paired(row.final, top.final))
        for point, top in tops.items()
        if top is not None
        for row in points[point]
        if row is not top
    ]
    p_values = corrected([d for _, _, d in pairs], sum(map(pairs_of, points.values())))
    kinds = {point: {kind: [] for kind in FINDINGS} for point in points}
    for (point, row, d), p in zip(pairs, p_values, strict=True):
        kinds[point][_standing(row, d, p, by)].append(row)
    count = sum(map(pairs_of, points.values()))
    return {
        point: Ranking(rows, tops[point], kinds[point], count)
        for point, rows in points.items()
    }


def pairs_of(rows: Sequence[Row]) -> int:
    """Returns the number of pairs of rows with a result."""
    return math.comb(sum(row.measure is not None for row in rows), 2)


def by_point(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows to compare with one another, at each value of a sweep."""
    points = [p for p in dict.fromkeys(row.point for row in rows) if p]
    # A variant without the swept flag is compared at every value.
    return {p: [x for x in rows if x.point in (p, "")] for p in points or [""]}


def leader(rows: Sequence[Row], by: Measure) -> Row | None:
    """Returns the row with the best mean, the first of equal ones; None without any."""
    means = [(by.side * r.measure.mean, r) for r in rows if r.measure is not None]
    best = max((mean for mean, _ in means), default=0.0)
    least = best - ROUNDING * abs(best)
    return next((row for mean, row in means if mean >= least), None)


def _standing(row: Row, d: Difference | None, p: float | None, by: Measure) -> str:
    """Returns how a row stands to the best: a key of FINDINGS.

    Args:
        row: the row.
        d: its difference to the best.
        p: the corrected p-value of that.
        by: the measure.
    """
    if row.measure is None:
        return "lost"
    # Without an interval no difference is certain, however large it is.
    if d is None or d.low is None or d.high is None or p is None:
        return "few"
    if d.low <= 0 <= d.high:
        return "unseen"
    if by.side * d.mean > 0:
        return "better"
    if row.at_edge:
        return "edge"
    return "worse" if p < LEVEL else "doubtful"


def default_target(base: Row | None, by: Measure) -> float | None:
    """Returns a target near the baseline: 99 % of an accuracy, 105 % of a loss.

    It is rounded to the easier side. What one noisy row reaches does not move it.

    Args:
        base: the row of the baseline; None without one.
        by: the measure.
    """
    if base is None or base.measure is None:
        return None
    mean = base.measure.mean
    margin = SHARES[by.higher_is_better] * abs(mean)
    if not margin:
        return mean
    unit = 10.0 ** (math.floor(math.log10(margin)) - 1)
    # A mean may be a round number except for rounding: 1e-6 of a unit keeps it.
    easier = math.floor((by.side * mean - margin) / unit + 1e-6) * unit
    return by.side * round(easier, 12)


def timed(row: Row, curve: Curve, by: Measure, target: float | None) -> Row:
    """Returns the row with its modelled times, to the target and in all."""
    clocks, at = curve.seconds, _reached(curve, by, target)
    return row._replace(
        seconds={name: clock[-1] for name, clock in clocks.items()},
        to_target={
            name: None if at is None else clock[at] for name, clock in clocks.items()
        },
        steps_to_target=None if at is None else curve.steps[at],
    )


def _reached(curve: Curve, by: Measure, target: float | None) -> int | None:
    """Returns the index of the first evaluation at which the mean is that good."""
    if target is None or by.key not in curve.bands:
        return None
    least = by.side * target - ROUNDING * abs(target)
    means = enumerate(curve.bands[by.key].mean)
    return next((i for i, x in means if by.side * x >= least), None)
