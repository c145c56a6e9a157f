"""The line at the top of a page, and the numbers beside it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from experiments.cli.terminal import size
from experiments.study.analysis.formatting import (
    counted,
    ends,
    named,
    sentence,
    shown,
    with_unit,
)
from experiments.study.analysis.ranking import Ranking, leader
from experiments.study.analysis.rates import factor
from experiments.study.analysis.results import ONE_NOMINAL, Row
from experiments.study.analysis.words import claims
from experiments.study.analysis.words.headline import share
from experiments.study.statistics import Measure, paired

# Two longer names do not fit in one line, in characters.
LONGEST = 40

Number = tuple[str, str]


def lead(points: Mapping[str, Ranking], by: Measure, terms: str) -> str:
    """Returns the answer in one line.

    Args:
        points: rankings by the value of the sweep, by "" without one.
        by: the measure.
        terms: terms of the comparison.
    """
    if terms == ONE_NOMINAL:
        return "No winner at one nominal learning rate"
    first = next(iter(points.values()))
    text = _swept(points, by) if len(points) > 1 else _line(first, by)
    return f"{sentence(terms)}: {text}" if terms else text


def _line(ranking: Ranking, by: Measure) -> str:
    """Returns the best of these rows, as surely as it is known."""
    rows, top, kinds, _ = ranking
    if top is None:
        return "All runs diverged"
    if len(kinds["lost"]) == len(rows) - 1:
        return f"{top.label}: there is nothing to compare it to"
    # All comparisons are paired: if one has too few seeds, the line cannot be surer.
    if kinds["few"]:
        count = top.seeds - top.diverged
        seeds = f"{counted(count)} {'is' if count == 1 else 'are'}"
        return f"{top.label} leads, but {seeds} too few to tell"
    if top.diverged:
        return f"{top.label} leads, but {top.diverged} of its {top.seeds} runs diverged"
    alike = [*kinds["doubtful"], *kinds["unseen"]]
    if not alike and kinds["edge"]:
        some = f"{len(kinds['edge'])} of {len(rows) - 1} others"
        return f"{top.label} leads, but {some} may be better beyond what was tried"
    if not alike:
        partly = " in the mean alone" if kinds["better"] else ""
        return f"{top.label} has the best {by.name}{partly}"
    if len(alike) == len(rows) - 1:
        return _unseen(top, alike, by)
    some = f"{len(alike)} of {len(rows) - 1} others"
    return f"{top.label} leads, but {some} cannot be told from it"


def _unseen(top: Row, alike: Sequence[Row], by: Measure) -> str:
    """Returns that no row can be told from the best, and how far the second is."""
    second = leader(alike, by) or top
    apart = claims.apart(paired(top.final, second.final), by)
    # Names that need a second line are left to the headline.
    if len(alike) == 1 and len(top.label + second.label) <= LONGEST:
        return f"No difference seen between {top.label} and {second.label}{apart}"
    by_how_much = apart.replace(": ", f": {top.label} is ahead by ")
    return f"No difference seen{by_how_much}"


def _swept(points: Mapping[str, Ranking], by: Measure) -> str:
    """Returns the best variants, and at how many values of a sweep each is it."""
    sweep = next(iter(points)).partition("=")[0]
    tops = Counter(each.top.label for each in points.values() if each.top is not None)
    if not tops:
        return "All runs diverged"
    first, count = tops.most_common(1)[0]
    lost = any(x.top.diverged for x in points.values() if x.top is not None)
    but = "; some of these runs diverged" if lost else ""
    if count == len(points):
        return f"{first} has the best mean {by.name} at every value of {sweep}{but}"
    each = ", ".join(f"{label} at {times}" for label, times in tops.most_common())
    return f"Best mean {by.name}: {each} of {len(points)} values of {sweep}{but}"


def numbers(
    points: Mapping[str, Ranking],
    every: Ranking,
    by: Measure,
    baseline: str,
    terms: str,
    times: float,
) -> list[Number]:
    """Returns up to three numbers beside the line: value and meaning.

    Args:
        points: rankings by the value of the sweep, by "" without one.
        every: all rows of the table.
        by: the measure.
        baseline: label to which all others are compared.
        terms: terms of the comparison.
        times: ratio of the largest to the smallest effective learning rate.
    """
    rows, top = every.rows, every.top
    fine = [row for row in rows if row.measure]
    if top is None or top.measure is None:
        return []
    span = ends(fine, by), f"{by.name}, lowest and highest"
    if terms == ONE_NOMINAL:
        apart = factor(times), "between effective learning rates"
        return [span, apart, *(_sent(rows) if len(points) > 1 else _share(rows, fine))]
    value = with_unit(shown(top.measure.mean, by), by)
    first = value, f"{by.name} of {named(top)}"
    if len(points) > 1:
        return [first, span, *_sent(rows)]
    (own,) = points.values()
    worse = {row.label for kind in ("worse", "edge") for row in own.kinds[kind]}
    as_good = [row for row in fine if row is top or row.label not in worse]
    return [first, *_difference(fine, top, by, baseline), *_share(rows, as_good)]


def _difference(
    rows: Sequence[Row], top: Row, by: Measure, baseline: str
) -> list[Number]:
    """Returns the difference to the baseline of the best variant other than it."""
    # The baseline has no difference to itself: then the next best shows the gap.
    row = top if top.difference else leader([r for r in rows if r.difference], by)
    if row is None or row.difference is None:
        return []
    # A row at an edge may be better beyond it: no winner is named.
    fair = not any(each.at_edge for each in rows)
    p = row.corrected_p
    return [claims.amount(row.label, baseline, row.difference, by, fair, p)]


def _sent(rows: Sequence[Row]) -> list[Number]:
    """Returns the least and the most that is sent."""
    known = sorted(x for row in rows if (x := row.bytes_per_worker) is not None)
    limits = dict.fromkeys(size(x) for x in (known[:1] + known[-1:]))
    return [(" to ".join(limits), "sent by each worker")] if known else []


def _share(rows: Sequence[Row], pool: Sequence[Row]) -> list[Number]:
    """Returns the least that the pool sends, as a part of the most that any sends."""
    sent = [(x, row) for row in rows if (x := row.bytes_per_worker) is not None]
    cheap = [(x, row) for x, row in sent if row in pool]
    if not cheap:
        return []
    low, least = min(cheap, key=lambda each: each[0])
    high, most = max(sent, key=lambda each: each[0])
    name = named(least)
    if not low or low == high:
        return [(size(low), f"sent by each worker of {name}")]
    whole = named(most)
    return [(share(low / high), f"of what {whole} sends: {name}, {size(low)}")]
