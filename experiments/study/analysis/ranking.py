"""The rows that are compared: their standing to the best, and to a target near it."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from experiments.study.analysis.comparison import by_point, compared
from experiments.study.analysis.formatting import PHRASES
from experiments.study.analysis.results import Curve, Row
from experiments.study.statistics import ROUNDING, Measure

FINDINGS = PHRASES["standing"]
# Distance of the target from the baseline's measure, as a share of that.
SHARE = 0.05


class Ranking(NamedTuple):
    """Rows by their standing to the best of them.

    Attributes:
        rows: all, in the order of --algos.
        top: the best; None where all runs diverged.
        kinds: the others by the kind of their comparison to the best, or "lost" where
            all their runs diverged, in the order of FINDINGS.
        comparisons: how many p-values were corrected for.
    """

    rows: Sequence[Row]
    top: Row | None
    kinds: Mapping[str, Sequence[Row]]
    comparisons: int

    @property
    def best(self) -> list[Row]:
        """The best row, and all that are not known to be worse."""
        alike = ("better", "doubtful", "unseen", "few")
        rows = [row for kind in alike for row in self.kinds[kind]]
        return rows if self.top is None else [self.top, *rows]


def rankings(rows: Sequence[Row], by: Measure) -> dict[str, Ranking]:
    """Ranks rows by the differences of their final measures to the best.

    P-values are corrected for all pairs of rows: each might have been the best.

    Args:
        rows: rows of the table.
        by: the measure.

    Returns:
        A ranking for each value of a sweep; one for "" without a sweep.
    """
    points = by_point(rows)
    tops = {point: leader(group, by) for point, group in points.items()}
    pairs, rest = [], []
    for point, top in tops.items():
        others = [row for row in points[point] if row is not top]
        pairs += [(row, top) for row in others if top is not None]
        rest += combinations(others, 2)
    comparisons = iter(compared(pairs, rest, by))
    found = {}
    for point, top in tops.items():
        kinds, count = {kind: [] for kind in FINDINGS}, 0
        for row in points[point]:
            if top is None or row is top:
                continue
            comparison = next(comparisons)
            count, kind = comparison.count, comparison.kind
            if row.measure is None:
                kind = "lost"
            elif kind == "worse" and row.at_edge:
                kind = "edge"
            kinds[kind].append(row)
        found[point] = Ranking(points[point], top, kinds, count)
    return found


def leader(rows: Sequence[Row], by: Measure) -> Row | None:
    """Returns the row with the best mean, the first of equal ones; None without any."""
    means = [(by.side * r.measure.mean, r) for r in rows if r.measure is not None]
    best = max((mean for mean, _ in means), default=0.0)
    least = best - ROUNDING * abs(best)
    return next((row for mean, row in means if mean >= least), None)


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
