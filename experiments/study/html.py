"""A report as one HTML file that needs nothing else: no script, no other file."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

from experiments.study.amounts import (
    duration,
    named,
    sentence,
    speed,
    tuned,
)
from experiments.study.html_tables import prose, results, tuning
from experiments.study.results import Report

HEADINGS = {
    "measure": "",  # the measure's own name
    "loss": "Loss",
    "replicas": "Inside the replicas",
    "more": "More measures",
}


class Shown(NamedTuple):
    """A figure as the page takes it: an SVG, a note below it, and its group."""

    svg: str
    note: str
    group: str


def page(report: Report, figures: Mapping[str, Shown]) -> str:
    """The report as the text of an HTML file.

    Args:
        report: what is told.
        figures: by name, in their order.
    """
    css = Path(__file__).with_name("report.css").read_text()
    parts = [
        header(report),
        section("results", "Results", results(report)),
        words(report, figures),
        remarks(report),
        *pictures(report, figures),
        tuned_section(report, figures),
        paper(report),
        details(report),
        commands(report),
    ]
    body = "\n".join(part for part in parts if part)
    # The policy keeps a browser from asking for anything, whatever a label holds.
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(report.title)}</title>
<style>
{css}</style>
</head>
<body>
<main>
{body}
</main>
<footer><p>{FILES}</p></footer>
</body>
</html>
"""


FILES = (
    "Beside this page: the table as table.md and table.csv, the figures as SVG and PNG "
    "in figures/. A run's metrics in pandas: "
    "<code>pandas.read_json(&quot;metrics.jsonl&quot;, lines=True)</code>."
)


def header(report: Report) -> str:
    """The title, small, and the answer, large."""
    return (
        f"<header><h1>{escape(report.title)}</h1>\n"
        f'<p class="headline">{prose(report.headline)}</p></header>'
    )


def section(name: str, heading: str, content: str, kind: str = "") -> str:
    """A part of the page under its heading."""
    classes = f' class="{kind}"' if kind else ""
    return (
        f'<section{classes} aria-labelledby="{name}">\n'
        f'<h2 id="{name}">{escape(heading)}</h2>\n{content}\n</section>'
    )


def items(texts: list[str]) -> str:
    """A list."""
    return "<ul>\n" + "\n".join(f"<li>{prose(x)}</li>" for x in texts) + "\n</ul>"


def words(report: Report, figures: Mapping[str, Shown]) -> str:
    """A sentence about each algorithm, beside the differences."""
    drawn = [figure(x) for x in figures.values() if x.group == "answer"]
    told = items(report.sentences) if report.sentences else ""
    if not drawn:
        return section("words", "In words", told) if told else ""
    content = f"<div>{told}</div>\n" + "\n".join(drawn)
    return section("words", "In words", f'<div class="answer">\n{content}\n</div>')


def remarks(report: Report) -> str:
    """What a reader must know."""
    if not report.remarks:
        return ""
    return section("remarks", "Before relying on it", items(report.remarks), "remarks")


def pictures(report: Report, figures: Mapping[str, Shown]) -> list[str]:
    """The figures under their headings."""
    parts = []
    for group, heading in HEADINGS.items():
        texts = [figure(x) for x in figures.values() if x.group == group]
        if texts:
            about = ABOUT.get(group, "")
            grid = '<div class="figures">\n' + "\n".join(texts) + "\n</div>"
            name = heading or sentence(report.measure.name)
            parts.append(section(f"figures-{group}", name, f"{about}{grid}"))
    return parts


def figure(picture: Shown) -> str:
    """A figure and the note below it."""
    note = picture.note
    below = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f"<figure>{picture.svg}{below}</figure>"


BANDS = "Lines are means over the seeds, bands one standard deviation to each side."
ABOUT = {
    "measure": f'<p class="muted">{BANDS} Runs that diverged are left out.</p>\n',
}


def tuned_section(report: Report, figures: Mapping[str, Shown]) -> str:
    """What was tuned, as figures and as a table."""
    if not report.tuning:
        return ""
    drawn = [figure(x) for x in figures.values() if x.group == "tuning"]
    content = "\n".join([*drawn, f"<div>{tuning(report)}</div>"])
    return section("tuning", "Tuning", f'<div class="answer">\n{content}\n</div>')


def paper(report: Report) -> str:
    """What the preset repeats, if the study is one."""
    if report.paper is None:
        return ""
    p = report.paper
    entries = {"Preset": p.preset, "Source": p.source}
    entries |= {"It found": p.found, "Different here": p.differs}
    return section("paper", p.title, definitions(entries), "paper")


def definitions(entries: Mapping[str, str]) -> str:
    """Names and values."""
    lines = (
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
        for name, value in entries.items()
    )
    return "<dl>\n" + "\n".join(lines) + "\n</dl>"


def folded(name: str, content: str) -> str:
    """A part that opens when it is asked for."""
    return f"<details><summary>{escape(name)}</summary>\n{content}\n</details>"


def details(report: Report) -> str:
    """Settings and environment."""
    links = {
        f"network {n.name}": f"{speed(n.bandwidth)}, {duration(n.latency)}"
        for n in report.networks
    }
    parts = [folded("Settings", definitions(report.settings | links))]
    parts.append(folded("Environment", definitions(report.environment)))
    chosen = {named(row.label, row.point): tuned(row) for row in report.rows}
    chosen = {name: values for name, values in chosen.items() if values}
    if chosen:
        parts.insert(1, folded("Settings that were tuned", definitions(chosen)))
    return section("details", "Settings and environment", "\n".join(parts))


def commands(report: Report) -> str:
    """What to type to see it again."""
    each = "\n".join(
        f"<p>{escape(named(row.label, row.point))}</p>\n"
        f"<pre>{escape(row.command)}</pre>"
        for row in report.rows
    )
    runs = folded("The runs one by one; --seed is added to each", each)
    study = f"<p>The whole study:</p>\n<pre>{escape(report.command)}</pre>"
    return section("commands", "Repeat it", f"{study}\n{runs}")
