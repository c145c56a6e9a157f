"""A report as one HTML file that needs nothing else: no script, no other file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from experiments.cli.terminal import rate
from experiments.study.analysis import formatting, quantities
from experiments.study.analysis.results import ONE_NOMINAL, Report, Row, Tuning
from experiments.study.report.styles import MARKERS, looks

if TYPE_CHECKING:
    from experiments.study.report.canvas import Drawing  # imports matplotlib

TIED = re.compile(
    r"(?<=\d) (?=%|points|seeds|runs|times|[kMGT]?B\b)|(?<=±) | (?=±)"
    r"|(?<=\d,) (?=-?[\d.e+-]+\])"
)
FLAG = re.compile(r"(?<![\w-])--[\w-]+")
HEADINGS = {"sweep": "Over the sweep", "measure": "", "loss": "Loss"}  # "": the measure


class Shown(NamedTuple):
    """A figure as the page takes it.

    Attributes:
        wide: an SVG for screens; "" where the narrow one is for all.
        narrow: for phones.
        drawing: what is said of it.
    """

    wide: str
    narrow: str
    drawing: Drawing


class Chart(NamedTuple):
    """One quantity against all that it is drawn against.

    Attributes:
        id: its own in the page.
        views: to choose from.
        folded: to be opened.
    """

    id: str
    views: Sequence[Shown]
    folded: Sequence[Shown]


def page(report: Report, figures: Mapping[str, Shown]) -> str:
    """The report as the text of an HTML file.

    Args:
        report: what is told.
        figures: by name, in their order.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters.update(prose=prose, words=words, svg=Markup, rate=rate)
    environment.filters.update(sentence=formatting.sentence, number=formatting.number)
    css = Path(__file__).with_name("report.css").read_text()
    grouped = {
        name: [x for x in figures.values() if x.drawing.group == name]
        for name in ("answer", "replicas", "more", "tuning")
    }
    return environment.get_template("report.html.j2").render(
        r=report,
        css=Markup(css),
        amounts=formatting,
        looks=looks({row.label: row.algo for row in report.rows}),
        paths=MARKERS,
        labels=list(dict.fromkeys(row.label for row in report.rows)),
        points=list(dict.fromkeys(row.point for row in report.rows)),
        judged=judged,
        tried=tried,
        best_score=best_score,
        tuned=tuned(report),
        networks=network_texts(report),
        sections=sections(report, figures),
        still=still(report),
        **grouped,
    )


def prose(text: str) -> Markup:
    """Text in which no line ends between a figure and its unit; a command is code."""
    said, command = text, ""
    if found := formatting.COMMAND.search(text):
        said, command = text[: found.start()], found[0]
    code = Markup("<code>{}</code>").format(whole(command)) if command else ""
    return whole(TIED.sub("\u00a0", said)) + code


def whole(text: str) -> Markup:
    """Text in which no line ends within a flag, which a browser would cut."""
    return Markup(FLAG.sub(r'<span class="flag">\g<0></span>', str(escape(text))))


def words(label: str) -> Markup:
    """A name whose flags stay whole where they fit."""
    each = (Markup('<span class="word">{}</span>').format(x) for x in label.split())
    return Markup(" ").join(each)


def sections(
    report: Report, figures: Mapping[str, Shown]
) -> list[tuple[str, str, list[Chart]]]:
    """The figures over the runs: ids, headings and charts."""
    found = []
    for group, heading in HEADINGS.items():
        own = [(name, x) for name, x in figures.items() if x.drawing.group == group]
        charts = []
        for _, same in groupby(own, key=lambda each: each[1].drawing.subject):
            (first, shown), *others = same
            views = [shown, *(x for _, x in others)]
            unfolded = [x for x in views if not x.drawing.folded]
            folded = [x for x in views if x.drawing.folded]
            charts.append(Chart(first, unfolded, folded))
        if charts:
            name = heading or formatting.sentence(report.measure.name)
            found.append((f"figures-{group}", name, charts))
    return found


def still(report: Report) -> list[str]:
    """The quantities of the replicas that were measured and always 0."""
    return [
        quantity.name
        for quantity in quantities.INSIDE
        if any(quantity.key in curve.bands for curve in report.curves)
        and quantities.is_empty(report, quantity)
    ]


def judged(report: Report, row: Row) -> str:
    """A class for a difference whose interval leaves out 0; words say it too."""
    difference = row.difference
    if difference is None or difference.low is None or difference.high is None:
        return ""
    if report.terms == ONE_NOMINAL or difference.low <= 0 <= difference.high:
        return ""
    better = (difference.mean > 0) == report.measure.higher_is_better
    return " good" if better else " bad"


def tried(tuning: Tuning) -> str:
    """The values that were tried, and how many of them diverged."""
    diverged = sum(s is None for s in tuning.scores)
    ends = [formatting.number(x) for x in (min(tuning.values), max(tuning.values))]
    more = f", {diverged} diverged" if diverged else ""
    return f"{len(tuning.values)} from {' to '.join(ends)}{more}"


def best_score(report: Report, tuning: Tuning) -> str:
    """The score of the value that was chosen."""
    scores = [s for s in tuning.scores if s is not None and math.isfinite(s)]
    if not scores:
        return formatting.MISSING
    best = max(scores) if report.measure.higher_is_better else min(scores)
    return formatting.with_unit(formatting.shown(best, report.measure), report.measure)


def tuned(report: Report) -> dict[str, str]:
    """The values that were chosen, by algorithm."""
    each = {
        formatting.named(r.label, r.point): formatting.tuned(r) for r in report.rows
    }
    return {name: values for name, values in each.items() if values}


def network_texts(report: Report) -> dict[str, str]:
    """The bandwidth and latency of each network."""
    return {
        f"network {n.name}": f"{formatting.speed(n.bandwidth)}, "
        f"{formatting.duration(n.latency)}"
        for n in report.networks
    }
