"""Compares rows by their paired differences: from the baseline, and from the best."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from experiments.study.analysis import formatting
from experiments.study.analysis.formatting import PHRASES, fixed, places_of
from experiments.study.analysis.results import Comparison, Row
from experiments.study.statistics import (
    LEVEL,
    MIN_SEEDS,
    ROUNDING,
    Difference,
    Measure,
    corrected,
    paired,
)

UNSEEN = "no difference seen"
FINDINGS = PHRASES["standing"]

Pairs = Sequence[tuple[Row, Row]]


class Ranking(NamedTuple):
    """Rows grouped by how they compare to the best of them.

    Attributes:
        rows: all rows, in the order of --algos.
        top: the best row; None if all runs diverged.
        kinds: the other rows by the kind of their comparison to the best, or "lost" if
            all their runs diverged, in the order of FINDINGS.
        comparisons: the number of comparisons that p-values are corrected for.
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


def against_baseline(
    rows: Sequence[Row], baseline: str, by: Measure, named: bool, is_given: bool
) -> tuple[list[Row], list[str]]:
    """Returns the rows with their comparisons to the baseline, and these in sentences.

    Args:
        rows: the rows to compare.
        baseline: label of the rows that all others are compared with.
        by: the measure.
        named: as in `compared`.
        is_given: whether the baseline was named beforehand. If not, p-values are
            corrected for all pairs of rows.
    """
    at = {row.point: row for row in rows if row.label == baseline}
    # A row that is not swept can be compared to a baseline at one value only.
    alone = next(iter(at.values())) if len(at) == 1 else None
    bases = [
        at.get(row.point) or at.get("") or (None if row.point else alone)
        for row in rows
    ]
    pairs = [(a, b) for a, b in zip(rows, bases, strict=True) if b and b is not a]
    rest = [
        pair
        for group in by_point(rows).values()
        for pair in combinations(group, 2)
        if not is_given and baseline not in (pair[0].label, pair[1].label)
    ]
    comparisons = iter(compared(pairs, rest, by, named))
    judged, sentences = [], []
    for row, base in zip(rows, bases, strict=True):
        if base is None:
            comparison = Comparison(f"no {baseline} to compare to here")
        elif base is row:
            comparison = Comparison("baseline")
        else:
            one = next(comparisons)
            comparison = one._replace(retuned=retuned(row, base, one.difference))
            lost = [formatting.diverged(x) for x in (row, base) if x.diverged]
            said = f"{row.name} against {base.name}: {comparison.sentence}"
            sentences.append(" ".join([said, *lost]))
        judged.append(row._replace(comparison=comparison))
    return judged, sentences


def rankings(rows: Sequence[Row], by: Measure) -> dict[str, Ranking]:
    """Ranks rows by the differences of their final measures from the best.

    P-values are corrected for all pairs of rows, because any could have been the best.

    Args:
        rows: rows of the table.
        by: the measure.

    Returns:
        A ranking for each value of a sweep; one for "" without a sweep.
    """
    points = by_point(rows)
    tops = {point: leader(group, by) for point, group in points.items()}
    others = {
        point: [row for row in points[point] if row is not top]
        for point, top in tops.items()
        if top is not None
    }
    pairs = [(x, top) for p, own in others.items() if (top := tops[p]) for x in own]
    rest = [pair for own in others.values() for pair in combinations(own, 2)]
    comparisons = iter(compared(pairs, rest, by))
    found = {}
    for point, group in points.items():
        kinds, count = {kind: [] for kind in FINDINGS}, 0
        for row in others.get(point, ()):
            comparison = next(comparisons)
            count, kind = comparison.count, comparison.kind if row.measure else "lost"
            is_edge = kind == "worse" and row.at_edge
            kinds["edge" if is_edge else kind].append(row)
        found[point] = Ranking(group, tops[point], kinds, count)
    return found


def compared(
    pairs: Pairs, rest: Pairs, by: Measure, named: bool = True
) -> list[Comparison]:
    """Compares pairs of rows.

    Args:
        pairs: each a row, and the row that it is compared with.
        rest: further pairs that p-values are corrected for.
        by: the measure.
        named: whether a winner is named. If not, "above" and "below" take the place of
            "better" and "worse". They also do if the worse row's best value is at an
            end of its range, because a value beyond it might be better.
    """
    differences = [paired(a.final, b.final) for a, b in (*pairs, *rest)]
    p_values = corrected(differences)
    count, found = sum(p is not None for p in p_values), []
    for (a, b), difference, p in zip(pairs, differences, p_values, strict=False):
        loser = a if difference and by.side * difference.mean < 0 else b
        found.append(in_words(difference, by, p, count, named and not loser.at_edge))
    return found


def retuned(
    a: Row, b: Row, difference: Difference | None
) -> tuple[float, float] | None:
    """Returns the 95 % interval of a difference that accounts for tuning, too.

    Each draw takes a mean difference from Student's distribution, and adds by how much
    the settings chosen by other tuning seeds are worse. The chosen setting looks better
    than it is on the seeds that chose it, so the interval tends to be too wide.

    Args:
        a: a row.
        b: the row that it is compared with.
        difference: their difference, from `paired`.

    Returns:
        None if a row is not tuned, or has too few tuning seeds or seeds.
    """
    if difference is None or difference.low is None or difference.high is None:
        return None
    if not (len(a.shortfalls) and len(b.shortfalls)):
        return None
    error = (difference.deviation or 0.0) / math.sqrt(difference.count)
    draws = np.random.default_rng(0).standard_t(difference.count - 1, len(a.shortfalls))
    draws = difference.mean + error * draws + np.subtract(a.shortfalls, b.shortfalls)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def in_words(
    difference: Difference | None,
    by: Measure,
    p: float | None = None,
    count: int = 1,
    named: bool = True,
) -> Comparison:
    """Returns a difference with its verdict and its words.

    Args:
        difference: the difference, from `paired`, at 95 %.
        by: the measure of the difference.
        p: its corrected p-value.
        count: number of comparisons that p is corrected for.
        named: as in `compared`.
    """
    if difference is None:
        return Comparison("nothing to compare: no seed in common", kind="few")
    mean, low, high, deviation, seeds, same_sign, _ = difference
    is_better = by.side * mean > 0
    kind = verdict = "better" if is_better else "worse"
    if low is None or high is None:
        kind, verdict = "few", "ahead" if is_better else "behind"
    elif low <= 0 <= high:
        kind = "unseen"
    elif p is not None and p >= LEVEL:
        kind = "doubtful"
    is_hidden = mean == 0 or kind in ("unseen", "doubtful")
    # If no difference is seen, the interval is of this row minus the other.
    amount, basis = figures(difference, by, 1 if is_hidden else mean)
    note = f" ({seeds} seeds, 95 % interval)"
    if mean == 0 and not deviation:
        verdict, note = "equal", ""
    elif is_hidden:
        verdict = UNSEEN + " after correction" * (kind == "doubtful")
    elif not named:
        verdict = "above" if mean > 0 else "below"
    if kind == "few" and note:
        note = ": equal differences have no interval"
        note = note if seeds >= MIN_SEEDS else ": too few for an interval"
    if kind == "few" or verdict == "equal":
        few = {1: "on one seed", 2: "in both seeds"}
        basis = few.get(seeds, f"in all {seeds} seeds")
        if not same_sign:
            basis = f"in the mean of {seeds} seeds" + " (not in all)" * (mean != 0)
    amount, p = "" if is_hidden else amount, p if count > 1 else None
    return Comparison(verdict, kind, difference, p, count, amount, basis, note)


def figures(difference: Difference, by: Measure, side: float) -> tuple[str, str]:
    """Returns a mean with its unit and its interval: "0.80 points", "[0.50, 1.10]".

    Args:
        difference: the difference.
        by: the measure.
        side: a number; the figures are multiplied by its sign.
    """
    factor = by.scale if side > 0 else -by.scale
    mean, low, high = factor * difference.mean, difference.low, difference.high
    places, interval = places_of(mean), ""
    if low is not None and high is not None:
        # The interval decides the digits: finer ones mean nothing.
        places = places_of(by.scale * (high - low) / 2)
        ends = [fixed(x, places) for x in sorted((factor * low, factor * high))]
        interval = f"[{', '.join(ends)}]"
    return f"{fixed(mean, places)} {by.difference_unit}".rstrip(), interval
