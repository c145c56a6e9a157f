"""Charts of lines: bands around them, tooltips, and a legend below."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.study.analysis import formatting
from experiments.study.analysis.results import Report
from experiments.study.report.axes import (
    CHARACTER,
    WIDTH,
    Range,
    panels,
    plain,
    scale,
    wrapped,
)
from experiments.study.report.styles import LIGHT, Styles

TIPS, MOST_TIPS = "tips", 40  # the mark of tooltips, and their number on a line
SIGN = 36  # width of a line's sign in a legend, with what is left free beside it
TARGET = {"color": LIGHT["muted"], "linewidth": 1, "linestyle": (0, (1, 2))}


class Line(NamedTuple):
    """A line, with arrays of one length.

    Attributes:
        label: of the algorithm.
        point: of the sweep; "" stands in all panels.
        x: where it is measured.
        y: NaN for gaps.
        low: the lower end of the band; y for none.
        high: the upper end of the band.
        tips: what is read where it is pointed at.
        every: markers stand at every so many points.
    """

    label: str
    point: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    tips: Sequence[str]
    every: int = 1


class Chart(NamedTuple):
    """Lines on common axes.

    Attributes:
        title: with the unit.
        x_label: the quantity of the x axis.
        x: its ends.
        y: the ends of the y axis.
        lines: in the order of the legend.
        styles: by label.
        labels: texts of the legend by label; a line without one is not in it.
        target: of a line across, and its text.
        bars: draw the band as error bars.
    """

    title: str
    x_label: str
    x: Range
    y: Range
    lines: Sequence[Line]
    styles: Styles
    labels: Mapping[str, str]
    target: tuple[float, str] | None = None
    bars: bool = False


def legend_texts(report: Report) -> dict[str, str]:
    """The texts of a legend: labels, and how many of their runs diverged."""
    gone = {row.label: formatting.lost(report, row.label) for row in report.rows}
    return {label: f"{label} ({x})" if x else label for label, x in gone.items()}


def draw_chart(chart: Chart) -> Figure:
    """Draws a panel a point of the sweep; what is not swept is in all of them."""
    points = list(dict.fromkeys(line.point for line in chart.lines if line.point))
    heads = [formatting.point_text(point) for point in points] or [""]
    height = 150 if len(points) > 1 else 210
    figure, panes = panels(chart.title, heads, chart.x_label, height)
    for point, axes in zip(points or [""], panes, strict=True):
        scale(axes, "x", chart.x)
        scale(axes, "y", chart.y)
        for line in chart.lines:
            draw_line(axes, line, chart, point)
        if chart.target:
            axes.axhline(chart.target[0], **TARGET)
    add_legend(figure, chart)
    return figure


def add_legend(figure: Figure, chart: Chart) -> None:
    """Adds a legend below the panels, and its height to the figure's."""
    shown = {line.label for line in chart.lines}
    texts = {label: x for label, x in chart.labels.items() if label in shown}
    signs = {x: Line2D([], [], **chart.styles[label]) for label, x in texts.items()}
    if chart.target and chart.y.low < chart.target[0] < chart.y.high:
        signs[chart.target[1]] = Line2D([], [], **TARGET)
    longest = max(map(len, signs), default=0) * CHARACTER + SIGN
    legend = figure.legend(
        [*signs.values()],
        ["\n".join(wrapped(text, WIDTH - 20 - SIGN)) for text in signs],
        loc="outside lower left",
        ncols=max(1, int((WIDTH - 20) / longest)),
    )
    # The layout takes its room from the panels.
    room = legend.get_window_extent().height
    figure.set_figheight(figure.get_figheight() + room / 72)


def draw_line(axes: Axes, line: Line, chart: Chart, point: str) -> None:
    """Draws a line of a point, its band and its tips."""
    if line.point not in (point, ""):
        return
    style = chart.styles[line.label]
    x = np.where(line.x > 0, line.x, np.nan) if chart.x.log else line.x
    if chart.bars:
        deviations = [line.y - line.low, line.high - line.y]
        axes.errorbar(x, line.y, deviations, elinewidth=1.2, **style)
    else:
        band = {"color": style["color"], "alpha": 0.16, "linewidth": 0}
        axes.fill_between(x, line.low, line.high, **band)
        # Markers of different lines start at different evaluations: lines that lie on
        # each other stay distinguishable.
        order = list(chart.styles)
        first = int(order.index(line.label) / len(order) * line.every)
        axes.plot(x, line.y, markevery=(first, line.every), **style)
    inside = (x >= chart.x.low) & (x <= chart.x.high) & (line.y <= chart.y.high)
    seen = np.flatnonzero(inside & (line.y >= chart.y.low))
    # Counted from the end: the last figure is what a reader looks for.
    chosen = seen[:: -(-(-len(seen) // MOST_TIPS) or 1)][::-1]
    add_tips(axes, x[chosen], line.y[chosen], [line.tips[int(i)] for i in chosen])


def add_tips(axes: Axes, x: Any, y: Any, texts: Sequence[str]) -> None:
    """Adds unseen markers, which become circles with tooltips in an SVG."""
    # A line outside the axes has no tips: without markers, matplotlib would put a
    # label of its own in place of an empty one.
    if texts:
        axes.plot(x, y, "o", alpha=0, gid=TIPS, label="\n".join(map(plain, texts)))
