"""The figures of a report, drawn with matplotlib: import this to draw them alone."""

import io
import re
from functools import partial
from pathlib import Path

import matplotlib.style

from experiments.study.analysis.results import Report
from experiments.study.report import comparisons, curves, trials
from experiments.study.report.axes import NARROW, WIDE, Plot
from experiments.study.report.styles import TEMPLATES, styles
from experiments.study.report.svg import pictures
from experiments.training import records

# Wraps all that draws or writes a figure: some settings are read as late as that.
style = partial(matplotlib.style.context, TEMPLATES / "figures.mplstyle")


def plots(report: Report) -> list[Plot]:
    """The figures that the report has something to see for, named as files."""
    look = styles({row.label: row.algo for row in report.rows})
    found: list[Plot] = []
    for module in (comparisons, curves, trials):
        for plot in module.plots(report, look):
            slug = re.sub(r"[^a-z0-9]+", "-", plot.name.lower()).strip("-")
            same = [x for x in found if x.name.partition("--")[0] == slug]
            name = f"{slug}--{len(same) + 1}" if same else slug
            found.append(plot._replace(name=name))
    return found


def save(plot: Plot, folder: Path, dpi: int) -> tuple[str, str]:
    """Writes a figure as SVG and PNG, in the size of large screens.

    Returns:
        A narrow and a wide SVG for a page; "" where the narrow one is for all screens.
    """
    figure = plot.draw(NARROW)
    name, wide = plot.name, ""
    if plot.large:
        # Without tooltips, as nobody points at a phone's figure.
        _, narrow = pictures(plot, figure, f"{name}-narrow", "narrow", tips=False)
        figure = plot.draw(WIDE)
        file, wide = pictures(plot, figure, name, "wide")
    else:
        file, narrow = pictures(plot, figure, name)
    records.write(folder / f"{name}.svg", file)
    with io.BytesIO() as png:
        figure.savefig(png, format="png", dpi=dpi)
        records.write(folder / f"{name}.png", png.getvalue())
    return narrow, wide
