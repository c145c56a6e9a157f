"""The answer of a study in two sentences."""

from collections.abc import Mapping, Sequence

from experiments.cli.terminal import size
from experiments.study.analysis.formatting import around, counted, ends, sentence
from experiments.study.analysis.ranking import FINDINGS, Ranking
from experiments.study.analysis.rates import factor
from experiments.study.analysis.results import ONE_NOMINAL, Row
from experiments.study.statistics import Measure

MOST_NAMED = 8  # labels in a sentence; the table has all


def answer(points: Mapping[str, Ranking], by: Measure, terms: str, times: float) -> str:
    """Returns the answer; for each value of a sweep, if there is one.

    Args:
        points: rankings by the value of the sweep, by "" without one.
        by: the measure.
        terms: terms of the comparison.
        times: ratio of the largest to the smallest effective learning rate.
    """
    found = []
    if terms == ONE_NOMINAL:
        found = [
            "At one nominal rate no winner is named: effective learning rates differ "
            f"{factor(times)}."
        ]
    for point, ranking in points.items():
        if terms == ONE_NOMINAL:
            text = unranked(ranking.rows, by)
        else:
            text = (f"{terms}, " if terms else "") + headline(ranking, by)
        # A label is no word to begin with a capital letter.
        text = sentence(text) if terms and not point else text
        found.append(f"{point}: {text}" if point else text)
    return "\n".join(found)


def headline(ranking: Ranking, by: Measure) -> str:
    """Returns the best row, how sure that is, and at what cost, in two sentences.

    Args:
        ranking: one row or more.
        by: the measure.

    The cost is the least that is sent by the best and by those that cannot be told from
    it, be it for chance or for too few seeds.
    """
    rows, top, kinds, comparisons = ranking
    if top is None or top.measure is None:
        return f"All runs of {listed([row.label for row in rows])} diverged."
    findings = [
        FINDINGS[kind].format(_several(those), count=comparisons)
        for kind, those in kinds.items()
        if those
    ] or ["there is nothing to compare it to"]
    mean, deviation, count = top.measure
    best = around(by.scale * mean, by.scale * (deviation or 0.0), by.unit)
    first = f"{_named(top)} has the best {by.name}, {best} ({counted(count)})"
    # A saving counts only if nothing is known to be lost by it.
    alike = ("better", "doubtful", "unseen", "few")
    pool = [top, *(row for kind in alike for row in kinds[kind])]
    return f"{first}: {'; '.join(findings)}. {_cost(rows, pool)}."


def _several(rows: Sequence[Row]) -> str:
    """Returns the labels; of too many for a sentence their number."""
    if len(rows) > MOST_NAMED:
        return f"{len(rows)} others"
    return listed([_named(row) for row in rows])


def unranked(rows: Sequence[Row], by: Measure) -> str:
    """Returns the range of means and the cost, without a winner, in small letters."""
    pool = [row for row in rows if row.measure is not None]
    lost = listed([row.label for row in rows if row.measure is None])
    if not pool:
        return f"All runs of {lost} diverged."
    text = f"the mean {by.name} is {ends(pool, by)}"
    gone = f"; all runs of {lost} diverged" if lost else ""
    return f"{text}{gone}. {_cost(rows, pool)}."


def _named(row: Row) -> str:
    """Returns a label, and how many of its runs a mean leaves out."""
    if not row.diverged or row.measure is None:
        return row.label
    return f"{row.label} ({row.diverged} of {row.seeds} runs diverged)"


def _cost(rows: Sequence[Row], pool: Sequence[Row]) -> str:
    """Returns the least that the pool sends, against the most that any row sends."""
    sent = {r.label: x for r in rows if (x := r.bytes_per_worker) is not None}
    counted = [row for row in pool if row.label in sent]
    missing = listed([row.label for row in pool if row.label not in sent])
    if not counted:
        return f"What {missing} sent could not be counted"
    least = min(sent[row.label] for row in counted)
    cheapest = [row for row in counted if sent[row.label] == least]
    shown = f"{size(least)} per worker" if least else "nothing"
    if len(pool) == 1:
        text = f"It sends {shown}"
    elif len(cheapest) == len(pool):
        text = f"Each of these sends {shown}"
    else:
        verb = "sends" if len(cheapest) == 1 else "send"
        text = f"Of these, {listed([r.label for r in cheapest])} {verb} least: {shown}"
    # One sentence explains all of the cheapest, or none.
    each = {_syncs(row) for row in cheapest}
    how = each.pop() if len(each) == 1 else ""
    text += _against(least, sent, len(sent) > len(counted), how)
    return f"{text} (what {missing} sent could not be counted)" if missing else text


def _syncs(row: Row) -> str:
    """Returns in how many steps a row sends; "" for all of them.

    They are 1 / period of the steps, rounded down, which explains an odd share.
    """
    is_rare = row.syncs and row.syncs < row.steps
    return f"{row.syncs} syncs in {row.steps} steps" if is_rare else ""


def _against(
    least: float, sent: Mapping[str, float], has_others: bool, how: str
) -> str:
    """Returns how the least compares to the row that sends most, or least, of all."""
    most, fewest = max(sent, key=sent.__getitem__), min(sent, key=sent.__getitem__)
    if sent[most] == sent[fewest]:
        return ", as every other does" if has_others else ""
    if least == sent[most]:
        return f", the most; {fewest} sends least, {size(sent[fewest])}"
    if least == 0:
        return f", {most} {size(sent[most])}"
    text = f", {share(least / sent[most])} of what {most} sends"
    return f"{text}: {how}" if how else text


def share(part: float) -> str:
    """Returns a part of a whole in words, such as "1/16" or "37 %"."""
    whole = round(1 / part)
    if whole >= 2 and abs(1 / part - whole) <= 0.01 * whole:
        return f"1/{whole:,}"
    if whole >= 10:
        return f"about 1/{whole:,}"
    return f"{100 * part:.0f} %" if part < 0.995 else "nearly all"


def titled(labels: Sequence[str], task: str) -> str:
    """Returns the title of a comparison, such as "sync_sgd and bmuf on digits"."""
    many = len(labels) > MOST_NAMED
    return f"{f'{len(labels)} algorithms' if many else listed(labels)} on {task}"


def listed(labels: Sequence[str]) -> str:
    """Returns names as a sentence has them: "a, b and c"."""
    return " and ".join([x for x in (", ".join(labels[:-1]), *labels[-1:]) if x])
