"""Whether learning rates make a comparison unfair."""

import math
from collections.abc import Sequence
from itertools import chain

from experiments.cli.words import parameter
from experiments.study.analysis.comparison import by_point
from experiments.study.analysis.formatting import number, say
from experiments.study.analysis.results import BY_DEFAULT, BY_HAND, ONE_NOMINAL, Row
from experiments.study.config import StudyConfig
from experiments.study.variants import Variant

# Effective rates whose ratio is larger are not comparable.
APART = 1.5


def rates(config: StudyConfig, rows: Sequence[Row]) -> tuple[str, float, list[str]]:
    """Compares the effective rates of the variants, at each value of the sweep.

    Args:
        config: the study.
        rows: rows of the table.

    Returns:
        ONE_NOMINAL, BY_HAND or BY_DEFAULT where rates were not tuned and effective ones
        differ, "" elsewhere; the ratio of the largest effective rate to the smallest;
        and remarks.
    """
    is_tuned = any("lr" in each.flags for each in config.tuned)
    # One algorithm at several rates is a study of rates.
    if is_tuned or len(_without_lr(config.variants)) < 2:
        return "", 1.0, []
    groups = [*by_point(rows).values()]
    unfair = [group for group in groups if _times(group) > APART]
    if not unfair and max(len(_effective(group)) for group in groups) > 1:
        return "", 1.0, []
    widest = max(groups, key=_times)
    known, times, terms = _effective(widest), _times(widest), ""
    others = ", ".join(r.name for r in widest if r.name not in known)
    remark = say("rates_unknown", names=others)
    if unfair:
        is_given = any("lr" in variant.parameters for variant in config.variants)
        is_swept = config.swept is not None and config.swept.flag == "lr"
        terms = BY_HAND if is_swept or is_given else BY_DEFAULT
        if all(len({r.lr for r in group}) == 1 for group in unfair):
            terms = ONE_NOMINAL
        order = sorted(known, key=known.__getitem__)
        low, *_, high = (f"{number(known[name])} of {name}" for name in order)
        remark = say(
            "unfair",
            terms=terms,
            at=f" {number(widest[0].lr)}," if terms == ONE_NOMINAL else "",
            times=factor(times),
            low=low,
            high=high,
            less=f", and that of {others} is not known" if others else "",
        )
    return terms, times, [f"{remark} {say('tune_rates')}"]


def _effective(group: Sequence[Row]) -> dict[str, float]:
    """Returns the effective rates by name; sign methods have none."""
    found = {r.name: r.effective_lr for r in group}
    return {k: x for k, x in found.items() if x is not None and 0 < x < math.inf}


def _times(group: Sequence[Row]) -> float:
    """Returns the ratio of the largest effective rate to the smallest."""
    found = _effective(group).values() or [1.0]
    return max(found) / min(found)


def factor(times: float) -> str:
    """Returns a ratio in words: "8 times" or "2.5 times"."""
    return f"{number(float(f'{times:.2g}'))} times"


def _without_lr(variants: Sequence[Variant]) -> set[tuple[str, ...]]:
    """Returns the algorithms with their own flags, except for rates."""
    return {
        (x.algo, *chain(*(own for own in x.own_flags if parameter(own[0]) != "lr")))
        for x in variants
    }
