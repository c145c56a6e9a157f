"""The line at the top of a page, and the numbers beside it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from experiments.cli.terminal import size
from experiments.study.analysis.claims import claim
from experiments.study.analysis.formatting import named, shown, with_unit
from experiments.study.analysis.headline import Contender, best, share, standing
from experiments.study.analysis.rates import Rates, factor
from experiments.study.analysis.results import (
    BY_HAND,
    ONE_NOMINAL,
    Lead,
    Measure,
    Number,
    Row,
)

LONGEST = 40  # two names in a line, characters


def lead(
    points: Mapping[str, Sequence[Contender]],
    rows: Sequence[Row],
    by: Measure,
    baseline: str,
    fairness: Rates,
) -> Lead:
    """The answer in a line and three numbers.

    Args:
        points: the algorithms by the value of the sweep; by "" where there is none.
        rows: of the table.
        by: what is compared.
        baseline: the label to which all others are compared.
        fairness: of the comparison.
    """
    if fairness.terms == ONE_NOMINAL:
        text = "No winner at one nominal learning rate"
    elif len(points) == 1:
        text = _line(next(iter(points.values())), by)
    else:
        text = _swept(points, by)
    if fairness.terms == BY_HAND:
        text = f"At rates given by hand: {text}"
    fine = [row for row in rows if row.measure]
    if not fine:
        return Lead(text, [])
    if fairness.terms == ONE_NOMINAL:
        apart = Number(factor(fairness.times), "between effective learning rates")
        sent = _sent(rows) if len(points) > 1 else _bytes(rows, fine)
        return Lead(text, [_ends(fine, by), apart, *sent])
    top = fine[best([row.measure for row in fine], by.higher_is_better) or 0]
    assert top.measure is not None
    value = with_unit(shown(top.measure.mean, by), by)
    found = [Number(value, f"{by.name} of {named(top.label, top.point)}")]
    if len(points) > 1:
        return Lead(text, [*found, _ends(fine, by), *_sent(rows)])
    (contenders,) = points.values()
    kinds = {c.label: standing(c, by.higher_is_better) for c in contenders}
    as_good = [r for r in fine if r is top or kinds[r.label] != "worse"]
    found += _difference(fine, top, by, baseline)
    return Lead(text, [*found, *_bytes(rows, as_good)])


def _line(contenders: Sequence[Contender], by: Measure) -> str:
    index = best([c.measure for c in contenders], by.higher_is_better)
    if index is None:
        return "All runs diverged"
    top, others = contenders[index], [c for c in contenders if c.measure]
    if len(others) == 1:
        return f"{top.label}: there is nothing to compare it to"
    kinds = {c.label: standing(c, by.higher_is_better) for c in others if c is not top}
    if "few" in kinds.values():
        count = top.seeds - top.diverged
        seeds = "one seed is" if count == 1 else f"{count} seeds are"
        return f"{top.label} leads, but {seeds} too few to tell"
    alike = [label for label, kind in kinds.items() if kind == "unseen"]
    if not alike:
        partly = " in the mean alone" if "better" in kinds.values() else ""
        return f"{top.label} has the best {by.name}{partly}"
    if len(alike) == 1 and len(top.label + alike[0]) <= LONGEST:
        return f"No difference seen between {top.label} and {alike[0]}"
    some = f"{len(alike)} of {len(contenders) - 1} others"
    return f"{top.label} leads, but {some} cannot be told from it"


def _swept(points: Mapping[str, Sequence[Contender]], by: Measure) -> str:
    """The best algorithms, and the number of values of a sweep at which each is it."""
    sweep = next(iter(points)).partition("=")[0]
    tops: Counter[str] = Counter()
    for each in points.values():
        index = best([c.measure for c in each], by.higher_is_better)
        if index is not None:
            tops[each[index].label] += 1
    if not tops:
        return "All runs diverged"
    (first, count), *others = tops.most_common()
    if count == len(points):
        return f"{first} has the best mean {by.name} at every value of {sweep}"
    each = ", ".join(
        f"{label} at {times}" for label, times in [(first, count), *others]
    )
    return f"Best mean {by.name}: {each} of {len(points)} values of {sweep}"


def _ends(rows: Sequence[Row], by: Measure) -> Number:
    """The lowest and the highest mean."""
    means = sorted(row.measure.mean for row in rows if row.measure)
    ends = dict.fromkeys((shown(means[0], by), shown(means[-1], by)))
    return Number(with_unit(" to ".join(ends), by), f"{by.name}, lowest and highest")


def _difference(
    rows: Sequence[Row], top: Row, by: Measure, baseline: str
) -> list[Number]:
    """The difference to the baseline of the best algorithm other than it."""
    others = [row for row in rows if row.difference]
    if not others:
        return []
    next_best = best([row.measure for row in others], by.higher_is_better)
    row = top if top.difference else others[next_best or 0]
    said = claim(row.difference, by.higher_is_better, by.scale, by.difference_unit)
    ends = f" [{', '.join(said.ends)}]" if said.ends else ""
    if not said.amount:
        text = f"difference of {row.label} to {baseline}{said.seeds}{ends}"
        return [Number("none seen", text)]
    text = f"{row.label} {said.relation}{said.link} {baseline}{said.seeds}{ends}"
    return [Number(said.amount, text)]


def _sent(rows: Sequence[Row]) -> list[Number]:
    """The least and the most that is sent."""
    known = sorted(x for row in rows if (x := row.bytes_per_worker) is not None)
    ends = dict.fromkeys(size(x) for x in (known[:1] + known[-1:]))
    return [Number(" to ".join(ends), "sent by each worker")] if known else []


def _bytes(rows: Sequence[Row], pool: Sequence[Row]) -> list[Number]:
    """The least that one of the pool sends, as a part of the most that any sends."""
    known = [(row.bytes_per_worker, row) for row in rows]
    sent = [(x, row) for x, row in known if x is not None]
    cheap = [(x, row) for x, row in sent if row in pool]
    if not cheap:
        return []
    low, least = min(cheap, key=lambda each: each[0])
    high, most = max(sent, key=lambda each: each[0])
    name = named(least.label, least.point)
    if not low or low == high:
        return [Number(size(low), f"sent by each worker of {name}")]
    of = named(most.label, most.point)
    return [Number(share(low / high), f"of what {of} sends: {name}, {size(low)}")]
