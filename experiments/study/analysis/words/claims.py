"""Paired differences in words."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from experiments.study.analysis.formatting import diverged, fixed, p_text, places_of
from experiments.study.analysis.ranking import by_point, others
from experiments.study.analysis.results import Row
from experiments.study.statistics import (
    LEVEL,
    MIN_SEEDS,
    Difference,
    Measure,
    corrected,
    paired,
)

EQUAL, UNSEEN = "equal", "no difference seen"
UNCERTAIN = f"{UNSEEN} after correction"


def compared(
    rows: Sequence[Row], baseline: str, by: Measure, named: bool, is_given: bool
) -> tuple[list[Row], list[str]]:
    """Returns the rows with their differences to the baseline, and these in sentences.

    Args:
        rows: the rows to compare.
        baseline: label of those to which all others are compared.
        by: the measure.
        named: as in `verdict`.
        is_given: whether the baseline was named beforehand. If not, p-values are
            corrected for all pairs of rows.
    """
    bases = [_counterpart(rows, row, baseline) for row in rows]
    pairs = [
        None if base is None or base is row else paired(row.final, base.final)
        for row, base in zip(rows, bases, strict=True)
    ]
    more = [] if is_given else _between_others(rows, bases)
    ps = corrected([*pairs, *more])
    count = sum(p is not None for p in ps)
    found, sentences = [], []
    for row, base, d, p in zip(rows, bases, pairs, ps, strict=False):
        if base is row:
            found.append(row._replace(verdict="baseline"))
        elif base is None:
            found.append(row._replace(verdict=f"no {baseline} to compare to here"))
        else:
            fair = named and not _is_worse_at_edge(row, base, d, by)
            p = p if count > 1 else None
            said = f"{verdict(row.name, base.name, d, by, fair, p)}."
            own = row._replace(difference=d, verdict=clause(d, by, fair, p))
            if p is not None:
                own = own._replace(corrected_p=p)
                said += f" Corrected for {count} comparisons, p = {p_text(p)}."
            found.append(own)
            lost = [diverged(each) for each in (row, base) if each.diverged]
            sentences.append(" ".join([said, *lost]))
    return found, sentences


def _between_others(
    rows: Sequence[Row], bases: Sequence[Row | None]
) -> list[Difference | None]:
    """Returns the differences of all pairs of rows without a baseline."""
    left = {id(base) for base in bases}
    groups = by_point([row for row in rows if id(row) not in left]).values()
    return [d for group in groups for d in others(group)]


def _is_worse_at_edge(
    row: Row, base: Row, difference: Difference | None, by: Measure
) -> bool:
    """Whether the worse of both might be better beyond the range that was tried."""
    if difference is None:
        return False
    return bool((row if by.side * difference.mean < 0 else base).at_edge)


def _counterpart(rows: Sequence[Row], row: Row, baseline: str) -> Row | None:
    """Returns the baseline at the same value of the sweep, or without one."""
    same = [x for x in rows if x.label == baseline]
    at = [x for x in same if x.point in (row.point, "")]
    return at[0] if at else same[0] if not row.point and len(same) == 1 else None


def verdict(
    name: str,
    baseline: str,
    difference: Difference | None,
    by: Measure,
    named: bool = True,
    p: float | None = None,
) -> str:
    """Returns "a is better than b by 0.8 points (5 seeds, 95 % interval 0.5 to 1.1)".

    Args:
        name: name of the variant.
        baseline: name of its counterpart.
        difference: from `paired`, at 95 %.
        by: measure whose difference it is.
        named: whether a winner is named; else it is "above" and "below" instead of
            "better" and "worse".
        p: the p-value of the difference, corrected; None without a correction.

    Amounts are positive, their side is in the words. Where no difference is seen, the
    interval is that of name's value - baseline's.
    """
    said = _claim(difference, by, named, p)
    rest = said.seeds + said.doubt + said.evidence
    if said.relation == EQUAL:
        return f"{name} and {baseline} are {EQUAL}{rest}"
    if not said.amount:
        return f"{said.relation} between {name} and {baseline}{rest}"
    return f"{name} is {_linked(said.relation)} {baseline} by {said.amount}{rest}"


def clause(
    difference: Difference | None,
    by: Measure,
    named: bool = True,
    p: float | None = None,
) -> str:
    """Returns the verdict without names: "better by 0.80 points [0.50, 1.10]"."""
    said = _claim(difference, by, named, p)
    amount = f" by {said.amount}" if said.amount else ""
    doubt = said.doubt if difference is None else ""
    return f"{said.relation}{amount}{said.seeds}{_interval(said)}{doubt}"


def apart(difference: Difference | None, by: Measure) -> str:
    """Returns ": 0.06 points [-0.30, 0.42]", positive where the first is better."""
    if difference is None or difference.low is None or difference.high is None:
        return ""
    mean, *ends = (
        by.side * by.scale * x
        for x in (difference.mean, difference.low, difference.high)
    )
    places = places_of(abs(ends[1] - ends[0]) / 2)
    low, high = (fixed(x, places) for x in sorted(ends))
    amount = " ".join(x for x in (fixed(mean, places), by.difference_unit) if x)
    return f": {amount} [{low}, {high}]"


def amount(
    name: str,
    baseline: str,
    difference: Difference,
    by: Measure,
    named: bool,
    p: float | None,
) -> tuple[str, str]:
    """Returns the verdict as a number and its meaning."""
    said = _claim(difference, by, named, p)
    rest = f"{baseline}{said.seeds}{_interval(said)}"
    if not said.amount:
        return "none seen", f"difference of {name} to {rest}"
    return said.amount, f"{name} {_linked(said.relation)} {rest}"


class _Claim(NamedTuple):
    """A difference in words, by their parts.

    Attributes:
        relation: such as "better".
        amount: such as "0.80 points"; "" without a difference.
        seeds: the seeds with this relation, without an interval.
        doubt: reason against it.
        evidence: reason for it, in brackets.
        ends: ends of the interval.
    """

    relation: str
    amount: str = ""
    seeds: str = ""
    doubt: str = ""
    evidence: str = ""
    ends: Sequence[str] = ()


def _linked(relation: str) -> str:
    """Returns a relation with the word before the baseline: "better than"."""
    links = {"better": " than", "worse": " than", "ahead": " of"}
    return relation + links.get(relation, "")


def _interval(said: _Claim) -> str:
    """Returns the interval in brackets, "" without one."""
    return f" [{', '.join(said.ends)}]" if said.ends else ""


def _claim(
    difference: Difference | None, by: Measure, named: bool, p: float | None
) -> _Claim:
    """Returns a difference in words, by their parts."""
    if difference is None:
        return _Claim("nothing to compare", doubt=": no seed in common")
    mean, low, high, deviation, count, *_ = difference
    everywhere = _everywhere(count)
    if mean == 0 and not deviation:
        return _Claim(EQUAL, seeds=everywhere)
    side = math.copysign(by.scale, mean)
    unit = f" {by.difference_unit}" if by.difference_unit else ""
    amount = fixed(side * mean, places_of(side * mean)) + unit
    if low is None or high is None:
        return _few(difference, by, named, amount)
    relation = _relation(mean, by, ("better", "worse") if named else None)
    uncertain = p is not None and p >= LEVEL
    # Digits follow the interval: finer ones mean nothing.
    places, outside = places_of(by.scale * (high - low) / 2), not low <= 0 <= high
    unclear = uncertain or not outside
    sign = by.scale if unclear else side
    ends = [fixed(x, places) for x in sorted((sign * low, sign * high))]
    evidence = f" ({count} seeds, 95 % interval {' to '.join(ends)}"
    if unclear:
        relation = UNCERTAIN if outside else UNSEEN
        return _Claim(relation, evidence=f"{evidence}{unit})", ends=ends)
    amount = fixed(side * mean, places) + unit
    return _Claim(relation, amount, evidence=f"{evidence})", ends=ends)


def _few(difference: Difference, by: Measure, named: bool, amount: str) -> _Claim:
    """Returns a difference over too few seeds for an interval in words."""
    mean, count = difference.mean, difference.count
    where = _everywhere(count)
    if not difference.same_sign:
        where = f" in the mean of {count} seeds" + " (not in all)" * (mean != 0)
    doubt = "too few for an interval" if count > 1 else "nothing can be said of chance"
    if count >= MIN_SEEDS:
        doubt = "equal differences have no interval"
    if mean == 0:
        return _Claim(UNSEEN, seeds=where, doubt=f": {doubt}")
    # "Better" needs an interval.
    relation = _relation(mean, by, ("ahead", "behind") if named else None)
    return _Claim(relation, amount, where, f": {doubt}")


def _everywhere(count: int) -> str:
    """Returns words for all of the seeds."""
    few = {1: " on one seed", 2: " in both seeds"}
    return few.get(count, f" in all {count} seeds")


def _relation(mean: float, by: Measure, words: tuple[str, str] | None) -> str:
    """Returns the word for a good or a bad difference, or for its side."""
    if words is None:
        return "above" if mean > 0 else "below"
    return words[by.side * mean < 0]
