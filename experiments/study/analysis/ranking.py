"""The rows that are compared with one another, by their standing to the best."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.study.analysis.formatting import PHRASES
from experiments.study.analysis.results import Row
from experiments.study.statistics import Measure, paired

FINDINGS = PHRASES["standing"]


class Ranking(NamedTuple):
    """Rows by their standing to the best of them.

    Attributes:
        rows: all, in the order of --algos.
        top: the best; None where all runs diverged.
        kinds: the others by standing, in the order of FINDINGS.
    """

    rows: Sequence[Row]
    top: Row | None
    kinds: Mapping[str, Sequence[Row]]


def ranked(rows: Sequence[Row], by: Measure) -> Ranking:
    """Ranks rows by the differences of their final measures to the best."""
    top = leader(rows, by)
    kinds: dict[str, list[Row]] = {kind: [] for kind in FINDINGS}
    for row in rows:
        if top is not None and row is not top:
            kinds[_standing(row, top, by)].append(row)
    return Ranking(rows, top, kinds)


def by_point(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows to compare with one another, at each value of a sweep."""
    points = [p for p in dict.fromkeys(row.point for row in rows) if p]
    # A variant without the swept flag is compared at every value.
    return {p: [x for x in rows if x.point in (p, "")] for p in points or [""]}


def leader(rows: Sequence[Row], by: Measure) -> Row | None:
    """Returns the row with the best mean, the first of equal ones; None without any."""
    means = [(by.side * r.measure.mean, r) for r in rows if r.measure is not None]
    return max(means, key=lambda each: each[0])[1] if means else None


def _standing(row: Row, top: Row, by: Measure) -> str:
    """Returns how a row stands to the best: a key of FINDINGS."""
    if row.measure is None:
        return "lost"
    d = row.to_best or paired(row.final, top.final)
    # Without an interval no difference is certain, however large it is.
    if d is None or d.low is None or d.high is None:
        return "few"
    if d.low <= 0 <= d.high:
        return "unseen"
    return "better" if by.side * d.mean > 0 else "worse"
