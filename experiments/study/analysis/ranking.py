"""The rows that are compared: their standing to the best, and to a target near it."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
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
# Distance of the target from the baseline's measure, as a share of that.
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
    """Ranks the rows at each value of a sweep.

    P-values are corrected for all pairs of rows: each might have been the best.
    """
    tops = {point: leader(rows, by) for point, rows in points.items()}
    pairs = [
        (point, row, row.to_best or paired(row.final, top.final))
        for point, top in tops.items()
        if top is not None
        for row in points[point]
        if row is not top
    ]
    more = [
        d
        for point, rows in points.items()
        for d in others([row for row in rows if row is not tops[point]])
    ]
    p_values = corrected([*(d for _, _, d in pairs), *more])
    kinds = {point: {kind: [] for kind in FINDINGS} for point in points}
    for (point, row, d), p in zip(pairs, p_values, strict=False):
        kinds[point][_standing(row, d, p, by)].append(row)
    count = sum(p is not None for p in p_values)
    return {
        point: Ranking(rows, tops[point], kinds[point], count)
        for point, rows in points.items()
    }


def others(rows: Iterable[Row]) -> Iterator[Difference | None]:
    """Yields the difference of each pair of rows."""
    for a, b in combinations(rows, 2):
        yield paired(a.final, b.final)


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
    if p >= LEVEL:
        return "doubtful"
    return "edge" if row.at_edge else "worse"


def default_target(rows: Sequence[Row], by: Measure) -> float | None:
    """Returns a target 5 % from the baseline's measure, on the easier side.

    Other rows do not move it. In a sweep the baseline's best row sets it.

    Args:
        rows: the baseline's.
        by: the measure.
    """
    best = leader(rows, by)
    if best is None or best.measure is None:
        return None
    margin = SHARE * abs(best.measure.mean)
    target = by.side * best.measure.mean - margin
    if not margin:
        return by.side * target
    unit = 10.0 ** (math.floor(math.log10(margin)) - 1)
    # A mean may be a round number except for rounding: 1e-6 of a unit keeps it.
    return by.side * round(math.floor(target / unit + 1e-6) * unit, 12)


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
