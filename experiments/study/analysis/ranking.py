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
    Spread,
    corrected,
    paired,
)

FINDINGS = PHRASES["standing"]
# Distance of the target from the best, of a loss; of an accuracy it is a point.
SHARE = 0.05


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
    """Ranks the rows at each value of a sweep; p-values are corrected over all."""
    tops = {point: leader(rows, by) for point, rows in points.items()}
    pairs = [
        (point, row, row.to_best or paired(row.final, top.final))
        for point, top in tops.items()
        if top is not None
        for row in points[point]
        if row is not top
    ]
    p_values = corrected([d for _, _, d in pairs])
    kinds = {point: {kind: [] for kind in FINDINGS} for point in points}
    for (point, row, d), p in zip(pairs, p_values, strict=True):
        kinds[point][_standing(row, d, p, by)].append(row)
    count = sum(p is not None for p in p_values)
    return {
        point: Ranking(rows, tops[point], kinds[point], count)
        for point, rows in points.items()
    }


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
    return "worse" if p < LEVEL else "doubtful"


def default_target(ranking: Ranking, by: Measure) -> float | None:
    """Returns a target that every row reaches that is not worse than the best.

    It is a point, or 5 % of a loss, from the best mean, or as far as the mean of a row
    without a difference seen to the best. With too few seeds, such a row is one whose
    deviations overlap. The target is rounded to the easier side.

    Args:
        ranking: all rows.
        by: the measure.
    """
    best, kinds = ranking.top, ranking.kinds
    if best is None or (top := best.measure) is None:
        return None
    margin = 1 / by.scale if by.higher_is_better else SHARE * abs(top.mean)
    few = [row for row in kinds["few"] if _overlaps(row, top)]
    alike = (*kinds["better"], *kinds["doubtful"], *kinds["unseen"], *few)
    good = [row.measure.mean for row in alike if row.measure]
    target = min([by.side * top.mean - margin, *(by.side * mean for mean in good)])
    if not margin:
        return by.side * target
    unit = 10.0 ** (math.floor(math.log10(margin)) - 1)
    # A mean may be a round number except for rounding: 1e-6 of a unit keeps it.
    return by.side * round(math.floor(target / unit + 1e-6) * unit, 12)


def _overlaps(row: Row, top: Spread) -> bool:
    """Whether the deviations of a row and of the best overlap."""
    mean, deviation, _ = row.measure or top
    return abs(mean - top.mean) <= (deviation or 0.0) + (top.deviation or 0.0)


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
