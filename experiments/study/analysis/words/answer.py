"""The answer of a study: a line, up to three numbers, and a paragraph."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.cli.terminal import size
from experiments.study.analysis import formatting
from experiments.study.analysis.comparison import FINDINGS, Ranking, figures, leader
from experiments.study.analysis.formatting import counted, ends, named, number, sentence
from experiments.study.analysis.rates import factor
from experiments.study.analysis.results import ONE_NOMINAL, Row
from experiments.study.runs import Tuning
from experiments.study.statistics import Measure, paired

MOST_NAMED = 8  # labels in a sentence; the table has all
# The most characters of two names that fit in one line.
LONGEST = 40

Points = Mapping[str, Ranking]
Number = tuple[str, str]


class Cost(NamedTuple):
    """The cost of some rows: bytes that they sent.

    Attributes:
        rows: the rows that sent the least.
        least: bytes that each of their workers sent.
        most: the row that sent the most.
        part: the least as a fraction of the most, in words; "" if nothing is saved.
    """

    rows: Sequence[Row]
    least: float
    most: Row
    part: str


def lead(points: Points, by: Measure, terms: str) -> str:
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
    """Returns the line about the best of these rows, and how certain it is."""
    rows, top, kinds, _ = ranking
    if top is None:
        return "All runs diverged"
    others, alike = len(rows) - 1, [*kinds["doubtful"], *kinds["unseen"]]
    if len(kinds["lost"]) == others:
        return f"{top.label}: there is nothing to compare it to"
    # All comparisons are paired: if one has too few seeds, the line must say so.
    if kinds["few"]:
        count = top.seeds - top.diverged
        but = f"{counted(count)} {'is' if count == 1 else 'are'} too few to tell"
    elif top.diverged:
        but = f"{top.diverged} of its {top.seeds} runs diverged"
    elif alike and len(alike) == others:
        return _unseen(top, leader(alike, by) or top, others, by)
    elif alike:
        but = f"{len(alike)} of {others} others cannot be distinguished from it"
    elif kinds["edge"]:
        some = f"{len(kinds['edge'])} of {others} others"
        but = f"{some} may be better outside the range tried"
    else:
        partly = " in the mean alone" if kinds["better"] else ""
        return f"{top.label} has the best {by.name}{partly}"
    return f"{top.label} leads, but {but}"


def _unseen(top: Row, second: Row, others: int, by: Measure) -> str:
    """Returns the line where no row can be distinguished from the best."""
    difference = paired(top.final, second.final)
    apart = " ".join(figures(difference, by, by.side)) if difference else ""
    # Names that need a second line are left out: the headline has them.
    if others == 1 and len(top.label + second.label) <= LONGEST:
        return f"No difference seen between {top.label} and {second.label}: {apart}"
    return f"No difference seen: {top.label} is ahead by {apart}"


def _swept(points: Points, by: Measure) -> str:
    """Returns the best variants, and at how many values of a sweep each is best."""
    sweep = next(iter(points)).partition("=")[0]
    tops = [x.top for x in points.values() if x.top is not None]
    if not tops:
        return "All runs diverged"
    but = "; some of these runs diverged" if any(x.diverged for x in tops) else ""
    times = Counter(top.label for top in tops).most_common()
    if times[0][1] == len(points):
        best = f"{times[0][0]} has the best mean {by.name}"
        return f"{best} at every value of {sweep}{but}"
    each = ", ".join(f"{label} at {count}" for label, count in times)
    return f"Best mean {by.name}: {each} of {len(points)} values of {sweep}{but}"


def answer(points: Points, by: Measure, terms: str, times: float) -> str:
    """Returns the answer in sentences; for each value of a sweep, if there is one.

    Args:
        points: as in `lead`.
        by: the measure.
        terms: terms of the comparison.
        times: ratio of the largest to the smallest effective learning rate.
    """
    lines, is_ranked = [], terms != ONE_NOMINAL
    if not is_ranked:
        unlike = f"the largest effective learning rate is {factor(times)} the smallest"
        lines = [f"At one nominal rate no winner is named: {unlike}."]
    for point, ranking in points.items():
        text = headline(ranking, by, is_ranked)
        text = f"{terms}, {text}" if terms and is_ranked else text
        # A label at the start of a sentence gets no capital letter.
        text = sentence(text) if terms and not point else text
        lines.append(f"{point}: {text}" if point else text)
    return "\n".join(lines)


def headline(ranking: Ranking, by: Measure, is_ranked: bool = True) -> str:
    """Returns the best row, how certain that is, and its cost, in two sentences.

    Args:
        ranking: one row or more.
        by: the measure.
        is_ranked: whether a winner is named; otherwise only the range of means is.

    The cost is the smallest number of bytes sent by the best row and by those that
    cannot be distinguished from it, whether by chance or because of too few seeds.
    """
    rows, top, kinds, comparisons = ranking
    if top is None or top.measure is None:
        return f"All runs of {listed([row.label for row in rows])} diverged."
    if not is_ranked:
        fine = [row for row in rows if row.measure is not None]
        return f"the mean {by.name} is {ends(fine, by)}.{_spent(rows, fine)}"
    findings = [
        FINDINGS[kind].format(_several(those), count=comparisons)
        for kind, those in kinds.items()
        if those
    ] or ["there is nothing to compare it to"]
    mean, deviation, count = top.measure
    best = formatting.around(by.scale * mean, by.scale * (deviation or 0.0), by.unit)
    first = f"{_several([top])} has the best {by.name}, {best} ({counted(count)})"
    return f"{first}: {'; '.join(findings)}.{_spent(rows, ranking.best)}"


def _several(rows: Sequence[Row]) -> str:
    """Returns labels with the number of diverged runs; for many rows, their number."""
    if len(rows) > MOST_NAMED:
        return f"{len(rows)} others"
    lost = [
        f" ({x.diverged} of {x.seeds} runs diverged)" * bool(x.diverged and x.measure)
        for x in rows
    ]
    return listed([row.label + text for row, text in zip(rows, lost, strict=True)])


def _spent(rows: Sequence[Row], pool: Sequence[Row]) -> str:
    """Returns the cost of the pool as a sentence."""
    if (cost := cost_of(rows, pool)) is None:
        return ""
    first, names = cost.rows[0], listed([row.label for row in cost.rows])
    who = f"Of these, {names} sent the least:"
    if len(cost.rows) == len(pool):
        who = "It sent" if len(pool) == 1 else f"{names} each sent"
    share = f", {cost.part} of what {cost.most.label} sent" if cost.part else ""
    # The number of syncs explains a share that is not round.
    if share and first.syncs and first.syncs < first.steps:
        share += f" ({first.syncs} syncs in {first.steps} steps)"
    return f" {who} {size(cost.least)} per worker{share}."


def cost_of(rows: Sequence[Row], pool: Sequence[Row]) -> Cost | None:
    """Returns the least that the pool sent, and the most that any row sent."""
    sent = [(x, row) for row in rows if (x := row.bytes_per_worker) is not None]
    own = [x for x, row in sent if row in pool]
    if not own:
        return None
    least, (high, most) = min(own), max(sent, key=lambda each: each[0])
    cheapest = [row for x, row in sent if row in pool and x == least]
    part = share(least / high) if 0 < least < high else ""
    return Cost(cheapest, least, most, part)


def share(part: float) -> str:
    """Returns a fraction in words, such as "1/16" or "37 %"."""
    whole = round(1 / part)
    if whole >= 2 and abs(1 / part - whole) <= 0.01 * whole:
        return f"1/{whole:,}"
    return f"about 1/{whole:,}" if whole >= 10 else f"{100 * part:.0f} %"


def numbers(
    points: Points,
    rows: Sequence[Row],
    by: Measure,
    baseline: str,
    terms: str,
    times: float,
) -> list[Number]:
    """Returns up to three numbers beside the line: value and meaning.

    Args:
        points: as in `lead`.
        rows: all rows of the table.
        by: the measure.
        baseline: label to which all others are compared.
        terms: terms of the comparison.
        times: ratio of the largest to the smallest effective learning rate.
    """
    top, is_swept = leader(rows, by), len(points) > 1
    if top is None or top.measure is None:
        return []
    fine, pool = [row for row in rows if row.measure], next(iter(points.values())).best
    reached = formatting.with_unit(formatting.shown(top.measure.mean, by), by)
    span = ends(fine, by), f"{by.name}, lowest and highest"
    found = [(reached, f"{by.name} of {named(top)}")]
    if terms == ONE_NOMINAL:
        found, pool = [span, (factor(times), "ratio of effective learning rates")], fine
    elif is_swept:
        found.append(span)
    else:
        # If the baseline is best, the next best row shows the gap.
        pairs = [row for row in fine if row.comparison.difference]
        best = top if top in pairs else leader(pairs, by)
        if best is not None:
            said, who = best.comparison, f"{best.label} against {baseline}"
            about = f"{who}: {said.verdict} {said.basis}"
            found.append((said.amount or "none seen", about))
    if cost := cost_of(rows, rows if is_swept else pool):
        least, most = cost.rows[0], cost.most
        low, high = size(cost.least), size(most.bytes_per_worker or 0.0)
        sent = low, f"sent at most by a worker of {named(least)}"
        if is_swept:
            sent = " to ".join(dict.fromkeys((low, high))), "sent at most by a worker"
        elif cost.part:
            sent = cost.part, f"of what {named(most)} sent: {named(least)}, {low}"
        found.append(sent)
    return found


def laws(scores: Sequence[Tuning]) -> tuple[str, list[str]]:
    """Returns the best values of tuned flags against a swept one.

    Args:
        scores: the scores of the tuning.

    Returns:
        The first law in one line, such as "Best outer-lr: 0.8 at workers=2, 0.4 at
        workers=8"; and a sentence for each variant and tuned flag, such as "Best
        outer-lr of diloco: 0.8 at workers=2, 0.4 [0.4, 0.8] at workers=8." An interval
        is shown unless it holds only the value itself. Both are empty without a sweep.
    """
    by_flag: dict[tuple[str, str], list[Tuning]] = {}
    for each in scores:
        if each.point and any(score is not None for score in each.scores):
            by_flag.setdefault((each.label, each.flag), []).append(each)
    line, sentences = "", []
    for (label, flag), own in by_flag.items():
        if len(own) > 1:
            values = ", ".join(f"{_best(x)} at {x.point}" for x in own)
            sentences.append(f"Best {flag} of {label}: {values}.")
            ends = [f"{number(x.chosen)} at {x.point}" for x in (own[0], own[-1])]
            line = line or f"Best {flag}: {', '.join(ends)}"
    return line, sentences


def _best(each: Tuning) -> str:
    """Returns the best value, and its interval unless it holds only that value."""
    if each.low is None or each.high is None or each.low == each.chosen == each.high:
        return number(each.chosen)
    return f"{number(each.chosen)} [{number(each.low)}, {number(each.high)}]"


def titled(labels: Sequence[str], task: str) -> str:
    """Returns the title of a comparison, such as "sync_sgd and bmuf on digits"."""
    many = len(labels) > MOST_NAMED
    return f"{f'{len(labels)} algorithms' if many else listed(labels)} on {task}"


def listed(labels: Sequence[str]) -> str:
    """Returns names joined as in a sentence: "a, b and c"."""
    return " and ".join([x for x in (", ".join(labels[:-1]), *labels[-1:]) if x])
