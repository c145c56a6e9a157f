"""A report as a single HTML file that needs no script and no other file."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from experiments.cli.terminal import rate
from experiments.study.analysis import formatting, quantities
from experiments.study.analysis.results import Report
from experiments.study.report.styles import CSS, VARIABLES, styles, templates

if TYPE_CHECKING:
    from experiments.study.report.figures import Plot  # imports matplotlib

# Spaces between a figure and its unit, around ± and within an interval.
TIED = re.compile(
    r"(?<=\d) (?=%|points|seeds|runs|times|[kMGT]?B\b)|(?<=±) | (?=±)"
    r"|(?<=\d,) (?=-?[\d.e+-]+\])"
)
FLAG = re.compile(r"(?<![\w-])--[\w-]+")


def page(report: Report, plots: Sequence["Plot"], pictures: Mapping[str, str]) -> str:
    """Renders the report as the text of an HTML file.

    Args:
        report: the study.
        plots: the figures, in order.
        pictures: SVGs by the names of the figures.
    """
    environment = templates()
    environment.filters.update(prose=prose, svg=Markup, rate=rate)
    environment.filters.update(sentence=formatting.sentence, number=formatting.number)
    environment.tests.update(known=formatting.known, always_zero=always_zero)
    return environment.get_template("report.html.j2").render(
        r=report,
        plots=plots,
        pictures=pictures,
        css=Markup(CSS),
        formatting=formatting,
        quantities=quantities,
        styles=styles({row.label: row.algo for row in report.rows}),
        variables=VARIABLES,
    )


def always_zero(quantity: quantities.Quantity, report: Report) -> bool:
    """Whether a quantity was measured, and is 0 at every evaluation."""
    measured = any(quantity.by.key in curve.bands for curve in report.curves)
    return measured and quantities.is_empty(report, quantity)


def prose(text: str) -> Markup:
    """Returns text without line breaks within flags, or between numbers and units."""
    tied = str(escape(TIED.sub("\u00a0", text)))
    return Markup(FLAG.sub(r'<span class="flag">\g<0></span>', tied))
