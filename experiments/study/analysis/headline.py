"""The answer of a study in two sentences."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.cli.terminal import size
from experiments.study.analysis.claims import fixed, places_of
from experiments.study.analysis.formatting import shown, with_unit
from experiments.study.analysis.results import Measure
from experiments.study.statistics import Difference, Spread

FINDINGS = {  # of the others' standing to the best, in the order of a headline
    "better": "yet {} is better where both have a result",
    "worse": "better than {} (95 % interval)",
    "unseen": "no difference seen to {}",
    "few": "too few seeds to tell it from {}",
    "lost": "all runs of {} diverged",
}


class Contender(NamedTuple):
    """One algorithm of a study, as the headline weighs it.

    Attributes:
        label: its name.
        measure: at the end, over the seeds that did not diverge; None where all did.
        difference: paired, this minus the best one's (see `best`); None for the best
            itself and where the two have no seed in common.
        diverged: runs that diverged.
        seeds: runs that there are, with those that diverged.
        bytes_per_worker: each worker sent; None where it could not be counted.
        syncs: in how many of its steps, in words; "" where that explains nothing.
    """

    label: str
    measure: Spread | None
    difference: Difference | None
    diverged: int
    seeds: int
    bytes_per_worker: float | None
    syncs: str = ""


def best(measures: Sequence[Spread | None], higher_is_better: bool) -> int | None:
    """The index of the best mean, the first of equal ones; None if all are None."""
    side = -1 if higher_is_better else 1
    found = [(side * m.mean, i) for i, m in enumerate(measures) if m is not None]
    return min(found)[1] if found else None


def headline(
    contenders: Sequence[Contender],
    name: str,
    higher_is_better: bool,
    scale: float,
    unit: str,
) -> str:
    """Which algorithm, how sure and at what cost, in two sentences.

    Args:
        contenders: one or more, in the order in which they were asked for.
        name: of the measure, such as "test accuracy".
        higher_is_better: as of an accuracy; of a loss lower is better.
        scale: what figures are multiplied by to be shown.
        unit: of figures when shown: "%", or "" for a loss.

    The cost is the least that one sends of the best and those not told from it, be it
    for chance or for too few seeds.
    """
    index = best([c.measure for c in contenders], higher_is_better)
    top = None if index is None else contenders[index]
    if top is None or top.measure is None:
        return f"All runs of {_and([c.label for c in contenders])} diverged."
    by_kind: dict[str, list[Contender]] = {kind: [] for kind in FINDINGS}
    for c in contenders:
        if c is not top:
            by_kind[standing(c, higher_is_better)].append(c)
    findings = [
        FINDINGS[kind].format(_and([_named(c) for c in those]))
        for kind, those in by_kind.items()
        if those
    ] or ["there is nothing to compare it to"]
    first = f"{_named(top)} has the best {name}, {_figure(top.measure, scale, unit)}"
    pool = [top, *by_kind["better"], *by_kind["unseen"], *by_kind["few"]]
    return f"{first}: {'; '.join(findings)}. {_cost(contenders, pool)}."


def unranked(contenders: Sequence[Contender], by: Measure) -> str:
    """The same where no winner may be named: what figures there are, at what cost.

    It begins with a small letter.

    Args:
        contenders: as of `headline`.
        by: what they are compared by.
    """
    pool = [c for c in contenders if c.measure is not None]
    lost = _and([c.label for c in contenders if c.measure is None])
    if not pool:
        return f"All runs of {lost} diverged."
    means = [c.measure.mean for c in pool if c.measure is not None]
    ends = dict.fromkeys(shown(x, by) for x in (min(means), max(means)))
    text = f"the mean {by.name} is {with_unit(' to '.join(ends), by)}"
    gone = f"; all runs of {lost} diverged" if lost else ""
    return f"{text}{gone}. {_cost(contenders, pool)}."


def standing(contender: Contender, higher_is_better: bool) -> str:
    """How one stands to the best: a key of FINDINGS."""
    d = contender.difference
    if contender.measure is None:
        return "lost"
    if d is None or d.low is None or d.high is None:
        return "few"
    if d.low <= 0 <= d.high:
        return "unseen"
    return "better" if (d.mean > 0) == higher_is_better else "worse"


def _named(contender: Contender) -> str:
    """Its label, and how many of its runs a mean leaves out."""
    label, measure, _, diverged, seeds, *_ = contender
    if not diverged or measure is None:
        return label
    return f"{label} ({diverged} of {seeds} runs diverged)"


def _figure(measure: Spread, scale: float, unit: str) -> str:
    """Mean ± deviation, and over how many seeds."""
    mean, deviation, count = measure
    text = f"{scale * mean:.4g}"
    if deviation:
        places = places_of(scale * deviation)
        text = f"{fixed(scale * mean, places)} ± {fixed(scale * deviation, places)}"
    seeds = "one seed" if count == 1 else f"{count} seeds"
    return f"{text} {unit}".rstrip() + f" ({seeds})"


def _cost(contenders: Sequence[Contender], pool: Sequence[Contender]) -> str:
    """What the cheapest of the pool sends, against what is sent at most."""
    known = {
        c.label: c.bytes_per_worker
        for c in contenders
        if c.bytes_per_worker is not None
    }
    counted = [c.label for c in pool if c.label in known]
    missing = _and([c.label for c in pool if c.label not in known])
    if not counted:
        return f"What {missing} sent could not be counted"
    least = min(known[label] for label in counted)
    cheapest = [label for label in counted if known[label] == least]
    sent = f"{size(least)} per worker" if least else "nothing"
    verb = "sends" if len(cheapest) == 1 else "send"
    if len(pool) == 1:
        text = f"It sends {sent}"
    elif len(cheapest) == len(pool):
        text = f"Each of these sends {sent}"
    else:
        text = f"Of these, {_and(cheapest)} {verb} least: {sent}"
    syncs = {c.syncs for c in pool if c.label in cheapest}
    how = syncs.pop() if len(syncs) == 1 else ""
    text += _against(least, known, len(known) > len(counted), how)
    return f"{text} (what {missing} sent could not be counted)" if missing else text


def _against(least: float, known: dict[str, float], others: bool, how: str) -> str:
    """How that compares to the one that sends most, or least, of all."""
    most, fewest = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    if known[most] == known[fewest]:
        return ", as every other does" if others else ""
    if least == known[most]:
        return f", the most; {fewest} sends least, {size(known[fewest])}"
    if least == 0:
        return f", {most} {size(known[most])}"
    text = f", {share(least / known[most])} of what {most} sends"
    return f"{text}: {how}" if how else text


def share(part: float) -> str:
    """A part of a whole, such as "1/16" or "37 %"."""
    whole = round(1 / part)
    if whole >= 2 and abs(1 / part - whole) <= 0.01 * whole:
        return f"1/{whole:,}"
    if whole >= 10:
        return f"about 1/{whole:,}"
    return f"{100 * part:.0f} %" if part < 0.995 else "nearly all"


def _and(labels: Sequence[str]) -> str:
    """Names in a sentence."""
    commas = [", ".join(labels[:-1]), *labels[-1:]]
    return " and ".join(commas if len(labels) > 1 else labels)
