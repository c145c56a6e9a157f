"""Compares rows by their paired differences, and phrases what a comparison says."""

from collections.abc import Sequence
from itertools import combinations

from experiments.study.analysis.formatting import diverged, fixed, places_of
from experiments.study.analysis.results import Comparison, Row
from experiments.study.statistics import (
    LEVEL,
    MIN_SEEDS,
    Difference,
    Measure,
    corrected,
    paired,
)

UNSEEN = "no difference seen"

Pairs = Sequence[tuple[Row, Row]]


def against_baseline(
    rows: Sequence[Row], baseline: str, by: Measure, named: bool, is_given: bool
) -> tuple[list[Row], list[str]]:
    """Returns the rows with their comparisons to the baseline, and these in sentences.

    Args:
        rows: the rows to compare.
        baseline: label of those to which all others are compared.
        by: the measure.
        named: as in `compared`.
        is_given: whether the baseline was named beforehand. If not, p-values are
            corrected for all pairs of rows.
    """
    bases = [_counterpart(rows, row, baseline) for row in rows]
    pairs = [(a, b) for a, b in zip(rows, bases, strict=True) if b and b is not a]
    rest = [x for x in all_pairs(rows) if baseline not in (x[0].label, x[1].label)]
    comparisons = iter(compared(pairs, [] if is_given else rest, by, named))
    judged, sentences = [], []
    for row, base in zip(rows, bases, strict=True):
        if base is None:
            comparison = Comparison(f"no {baseline} to compare to here")
        elif base is row:
            comparison = Comparison("baseline")
        else:
            comparison = next(comparisons)
            lost = [diverged(x) for x in (row, base) if x.diverged]
            said = f"{row.name} against {base.name}: {comparison.sentence}"
            sentences.append(" ".join([said, *lost]))
        judged.append(row._replace(comparison=comparison))
    return judged, sentences


def _counterpart(rows: Sequence[Row], row: Row, baseline: str) -> Row | None:
    """Returns the baseline at the same value of the sweep, or without one."""
    bases = [x for x in rows if x.label == baseline]
    near = [x for x in bases if x.point in (row.point, "")]
    if not near and not row.point and len(bases) == 1:
        return bases[0]
    return near[0] if near else None


def by_point(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows to compare with one another, at each value of a sweep."""
    points = [p for p in dict.fromkeys(row.point for row in rows) if p]
    # A variant without the swept flag is compared at every value.
    return {p: [x for x in rows if x.point in (p, "")] for p in points or [""]}


def all_pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Returns all pairs of rows that are compared with one another."""
    return [x for group in by_point(rows).values() for x in combinations(group, 2)]


def compared(
    pairs: Pairs, rest: Pairs, by: Measure, named: bool = True
) -> list[Comparison]:
    """Compares pairs of rows.

    Args:
        pairs: a row, and the one that it is compared with.
        rest: further pairs that p-values are corrected for.
        by: the measure.
        named: whether a winner is named; else it is "above" and "below" instead of
            "better" and "worse", as where the worse one's best value is at an end of
            its range: it might be better beyond.
    """
    differences = [paired(a.final, b.final) for a, b in (*pairs, *rest)]
    p_values = corrected(differences)
    count = sum(p is not None for p in p_values)
    return [
        in_words(d, by, p, count, named and not _loser(a, b, d, by).at_edge)
        for (a, b), d, p in zip(pairs, differences, p_values, strict=False)
    ]


def _loser(row: Row, other: Row, difference: Difference | None, by: Measure) -> Row:
    """Returns the worse of two rows."""
    return row if difference and by.side * difference.mean < 0 else other


def in_words(
    difference: Difference | None,
    by: Measure,
    p: float | None = None,
    count: int = 1,
    named: bool = True,
) -> Comparison:
    """Returns a difference with its verdict and its words.

    Args:
        difference: from `paired`, at 95 %.
        by: measure whose difference it is.
        p: its p-value, corrected.
        count: number of comparisons that p is corrected for.
        named: as in `compared`.
    """
    if difference is None:
        return Comparison("nothing to compare: no seed in common", kind="few")
    mean, low, high, deviation, seeds, *_ = difference
    is_better = by.side * mean > 0
    if low is None or high is None:
        kind = "few"
    elif low <= 0 <= high:
        kind = "unseen"
    elif p is not None and p >= LEVEL:
        kind = "doubtful"
    else:
        kind = "better" if is_better else "worse"
    if mean == 0:
        verdict = UNSEEN if deviation else "equal"
    elif kind in ("unseen", "doubtful"):
        verdict = UNSEEN + " after correction" * (kind == "doubtful")
    elif not named:
        verdict = "above" if mean > 0 else "below"
    elif kind == "few":
        verdict = "ahead" if is_better else "behind"
    else:
        verdict = kind
    is_unseen = verdict.startswith(UNSEEN)
    # Where no difference is seen, the interval is that of the row - the other.
    amount, basis = figures(difference, by, 1 if is_unseen else mean)
    note = f" ({seeds} seeds, 95 % interval)"
    if kind == "few":
        note = ": equal differences have no interval"
        note = note if seeds >= MIN_SEEDS else ": too few for an interval"
    if verdict == "equal":
        note = ""
    if kind == "few" or verdict == "equal":
        basis = _where(difference)
    amount = "" if is_unseen or verdict == "equal" else amount
    p = p if count > 1 else None
    return Comparison(verdict, kind, difference, p, count, amount, basis, note)


def _where(difference: Difference) -> str:
    """Returns the seeds that have this difference."""
    mean, count = difference.mean, difference.count
    if not difference.same_sign:
        return f"in the mean of {count} seeds" + " (not in all)" * (mean != 0)
    few = {1: "on one seed", 2: "in both seeds"}
    return few.get(count, f"in all {count} seeds")


def figures(difference: Difference, by: Measure, side: float) -> tuple[str, str]:
    """Returns a mean with its unit and its interval: "0.80 points", "[0.50, 1.10]".

    Args:
        difference: the difference.
        by: the measure.
        side: a number whose sign the figures are multiplied by.
    """
    factor = by.scale if side > 0 else -by.scale
    mean, low, high = factor * difference.mean, difference.low, difference.high
    if low is None or high is None:
        return f"{fixed(mean, places_of(mean))} {by.difference_unit}".rstrip(), ""
    # Digits follow the interval: finer ones mean nothing.
    places = places_of(by.scale * (high - low) / 2)
    ends = [fixed(x, places) for x in sorted((factor * low, factor * high))]
    amount = f"{fixed(mean, places)} {by.difference_unit}".rstrip()
    return amount, f"[{', '.join(ends)}]"
