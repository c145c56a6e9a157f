"""The tables of the page: results, and what was tuned."""

import math
import re
from html import escape

from experiments.screen import rate
from experiments.study.amounts import (
    MISSING,
    duration,
    named,
    number,
    point_text,
    seeds,
    sent,
    sentence,
    shown,
    spread,
    target,
    until,
    with_unit,
)
from experiments.study.results import Report, Row

TIED = re.compile(r"(?<=\d) (?=%|points|seeds|runs)|(?<=±) | (?=±)")


def prose(text: str) -> str:
    """Text in which no line ends between a figure and its unit."""
    return escape(TIED.sub("\u00a0", text))


def label_text(label: str, before: str = "") -> str:
    """A label whose flags stay whole where they fit, and HTML before its first word."""
    words = [escape(word) for word in label.split()] or [""]
    words[0] = before + words[0]
    return " ".join(f'<span class="word">{word}</span>' for word in words)


def results(report: Report) -> str:
    """The table: what each algorithm reached, how surely, at what cost."""
    measure = report.measure
    goal = "" if report.target is None else f"; to {target(report)}"
    heads = [
        "<th scope=col>Algorithm</th>",
        head(sentence(measure.name), "± standard deviation"),
        f"<th scope=col>Against {escape(report.baseline)}</th>",
        head("Each worker sent", "in syncs"),
        *(head(n.name, "run" + goal) for n in report.networks),
        head("Learning rate", "nominal; effective"),
    ]
    bodies = []
    for point in dict.fromkeys(row.point for row in report.rows):
        lines = [table_row(report, row) for row in report.rows if row.point == point]
        kind = ""
        if point:
            text = escape(point_text(point))
            group = f'<th class="group" scope="rowgroup" colspan={len(heads)}>{text}'
            lines.insert(0, f"<tr>{group}</th></tr>")
            kind = ' class="point"'
        bodies.append(f"<tbody{kind}>\n" + "\n".join(lines) + "\n</tbody>")
    caption = "At the end of training."
    if report.networks:
        seconds, known = report.step_seconds
        caption += f" Times are modelled: {duration(seconds)} of computation a step "
        caption += f"({known}), and the network's bandwidth and latency."
    table = (
        f'<table class="results"><caption><span>{escape(caption)}</span></caption>\n'
        f"<thead><tr>{''.join(heads)}</tr></thead>\n" + "\n".join(bodies) + "\n</table>"
    )
    return scrolling(table, "Results")


def scrolling(table: str, name: str) -> str:
    """A table that scrolls by itself where the page is narrow."""
    return (
        f'<div class="wide" role="region" aria-label="{escape(name)}" tabindex="0">'
        f"{table}</div>"
    )


def head(text: str, more: str) -> str:
    """The head of a column of figures."""
    return (
        f'<th scope=col class="figure">{escape(text)}<small>{escape(more)}</small></th>'
    )


def cell(text: str, more: str = "", strong: bool = False) -> str:
    """A figure, and a smaller one below it."""
    below = f"<small>{escape(more)}</small>" if more else ""
    above = f"<strong>{escape(text)}</strong>" if strong else escape(text)
    return f'<td class="figure">{above}{below}</td>'


def table_row(report: Report, row: Row) -> str:
    """A line of the table."""
    labels = list(dict.fromkeys(r.label for r in report.rows))
    colour = f"background: var(--series-{labels.index(row.label) % 8})"
    swatch = f'<span class="swatch" style="{colour}"></span>'
    kind = ' class="diverged"' if row.diverged else ""
    runs = f"<small{kind}>{escape(seeds(row))}</small>"
    if row.measure is None:
        measure = cell("all diverged" if row.diverged else MISSING)
    else:
        measure = cell(spread(row.measure, report.measure), strong=True)
    syncs = ""
    if row.syncs is not None:
        syncs = f"{row.syncs:,} sync{'' if row.syncs == 1 else 's'}"
    return (
        f'<tr><th scope="row">{label_text(row.label, swatch)}{runs}</th>{measure}'
        f'<td class="verdict{judged(report, row)}">{prose(row.verdict)}</td>'
        f"{cell(sent(row), syncs)}"
        + "".join(time_cell(report, row, n.name) for n in report.networks)
        + cell(rate(row.lr), rate(row.effective_lr))
        + "</tr>"
    )


def time_cell(report: Report, row: Row, network: str) -> str:
    """The time of the run, and until the target."""
    below = ""
    if report.target is not None:
        below = until(row, network)
    return cell(duration(row.seconds.get(network)), below)


def judged(report: Report, row: Row) -> str:
    """A class for a difference whose interval leaves out 0; words say it too."""
    difference = row.difference
    if difference is None or difference.low is None or difference.high is None:
        return ""
    if not (difference.low > 0 or difference.high < 0):
        return ""
    better = (difference.mean > 0) == report.measure.higher_is_better
    return " good" if better else " bad"


def tuning(report: Report) -> str:
    """What each algorithm was tuned over, and what was chosen."""
    measure = report.measure
    lines = []
    for t in report.tuning:
        scores = [s for s in t.scores if s is not None and math.isfinite(s)]
        best = max if measure.higher_is_better else min
        score = with_unit(shown(best(scores), measure), measure) if scores else MISSING
        edge = '<span class="bad">at the edge</span>' if t.at_edge else "inside"
        diverged = sum(s is None for s in t.scores)
        tried = f"{len(t.values)} from {number(min(t.values))} to "
        tried += number(max(t.values)) + (f", {diverged} diverged" if diverged else "")
        lines.append(
            f'<tr><th scope="row">{label_text(named(t.label, t.point))}</th>'
            f'<td>{escape(t.flag)}</td><td class="plain">{escape(tried)}</td>'
            f"{cell(number(t.chosen), strong=True)}{cell(score)}"
            f'<td class="plain">{edge}</td></tr>'
        )
    heads = "".join(
        f'<th scope=col class="{kind}">{text}</th>'
        for kind, text in (
            ("", "Algorithm"),
            ("", "Flag"),
            ("", "Values tried"),
            ("figure", "Chosen"),
            ("figure", "Its validation score"),
            ("", "In the range"),
        )
    )
    table = (
        "<table><caption><span>Chosen on validation data; the results above are on "
        f"test data.</span></caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n"
        + "\n".join(lines)
        + "\n</tbody></table>"
    )
    return scrolling(table, "What was tuned")
