"""Paired differences in words."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from experiments.study.statistics import Difference

EQUAL, UNSEEN = "equal", "no difference seen"


def verdict(
    name: str,
    baseline: str,
    difference: Difference | None,
    higher_is_better: bool | None,
    scale: float,
    unit: str,
) -> str:
    """Says: "a is better than b by 0.8 points (5 seeds, 95 % interval 0.5 to 1.1)".

    Args:
        name: of the algorithm.
        baseline: the name of what it is compared to.
        difference: from `paired`, at 95 %.
        higher_is_better: as of an accuracy; of a loss lower is better; None names no
            winner: "above" and "below" instead of "better" and "worse".
        scale: what differences are multiplied by to be shown.
        unit: of differences when shown: "points", or "" for a loss.

    Amounts are positive, their side is in the words. Where no difference is seen, the
    interval is of name's figure - baseline's.
    """
    said = claim(difference, higher_is_better, scale, unit)
    rest = said.seeds + said.doubt + said.evidence
    if said.relation == EQUAL:
        return f"{name} and {baseline} are {EQUAL}{rest}"
    if not said.amount:
        return f"{said.relation} between {name} and {baseline}{rest}"
    return f"{name} is {said.relation}{said.link} {baseline} by {said.amount}{rest}"


def clause(
    difference: Difference | None,
    higher_is_better: bool | None,
    scale: float,
    unit: str,
) -> str:
    """The verdict without names: "better by 0.80 points [0.50, 1.10]"."""
    said = claim(difference, higher_is_better, scale, unit)
    amount = f" by {said.amount}" if said.amount else ""
    ends = f" [{', '.join(said.ends)}]" if said.ends else ""
    doubt = said.doubt if difference is None else ""
    return f"{said.relation}{amount}{said.seeds}{ends}{doubt}"


class Claim(NamedTuple):
    """A difference in words, by their parts.

    Attributes:
        relation: such as "better".
        amount: such as "0.80 points"; "" where no difference is seen.
        seeds: in which of them, where there is no interval.
        doubt: what speaks against it.
        evidence: for it, in brackets.
        ends: of the interval.
    """

    relation: str
    amount: str = ""
    seeds: str = ""
    doubt: str = ""
    evidence: str = ""
    ends: Sequence[str] = ()

    @property
    def link(self) -> str:
        """The word between the relation and the baseline."""
        links = {"better": " than", "worse": " than", "ahead": " of"}
        return links.get(self.relation, "")


def claim(
    difference: Difference | None,
    higher_is_better: bool | None,
    scale: float,
    unit: str,
) -> Claim:
    """The parts of what is said of a difference."""
    if difference is None:
        return Claim("nothing to compare", doubt=": no seed in common")
    mean, low, high, deviation, count, _ = difference
    everywhere = _everywhere(count)
    if mean == 0 and not deviation:
        return Claim(EQUAL, seeds=everywhere)
    side, unit = math.copysign(scale, mean), f" {unit}" if unit else ""
    if low is None or high is None:
        amount = fixed(side * mean, places_of(side * mean)) + unit
        return _few(difference, higher_is_better, amount)
    relation = _relation(mean, higher_is_better, ("better", "worse"))
    if low == high:
        amount = fixed(side * mean, places_of(side * mean)) + unit
        return Claim(relation, amount, evidence=f" (the same{everywhere})")
    places, unclear = places_of(scale * (high - low) / 2), low <= 0 <= high
    sign = scale if unclear else side
    ends = [fixed(x, places) for x in sorted((sign * low, sign * high))]
    evidence = f" ({count} seeds, 95 % interval {' to '.join(ends)}"
    if unclear:
        return Claim(UNSEEN, evidence=f"{evidence}{unit})", ends=ends)
    amount = fixed(side * mean, places) + unit
    return Claim(relation, amount, evidence=f"{evidence})", ends=ends)


def _few(difference: Difference, higher_is_better: bool | None, amount: str) -> Claim:
    """The same of too few seeds for an interval."""
    mean, count = difference.mean, difference.count
    where = _everywhere(count)
    if not difference.same_sign:
        where = f" in the mean of {count} seeds" + " (not in all)" * (mean != 0)
    doubt = "too few for an interval" if count > 1 else "nothing can be said of chance"
    if mean == 0:
        return Claim(UNSEEN, seeds=where, doubt=f": {doubt}")
    relation = _relation(mean, higher_is_better, ("ahead", "behind"))
    return Claim(relation, amount, where, f": {doubt}")


def _everywhere(count: int) -> str:
    """Words for all of the seeds."""
    few = {1: " on one seed", 2: " in both seeds"}
    return few.get(count, f" in all {count} seeds")


def _relation(
    mean: float, higher_is_better: bool | None, words: tuple[str, str]
) -> str:
    """The word for a good or for a bad difference; without a winner, for its side."""
    if higher_is_better is None:
        return "above" if mean > 0 else "below"
    return words[(mean > 0) != higher_is_better]


def places_of(x: float) -> int:
    """Decimals that show two digits of a figure."""
    return max(0, 1 - int(f"{x:.1e}".split("e")[1]))


def fixed(x: float, places: int) -> str:
    """With so many decimals, but never 0.0 for what is not 0, nor zeros without end."""
    text = f"{x:.{places}f}"
    if x and (float(text) == 0 or len(text) > 12):
        return f"{x:.1g}" if float(text) == 0 else f"{x:.6g}"
    return text if x else "0"
