"""Charts: panels with axes in words, lines with bands and tooltips, a legend below.

A figure is as wide as a phone, in units of 1/72 inch, which are CSS pixels in a page.
At 72 dots per inch a unit is also a point and a pixel of matplotlib.
"""

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from experiments.cli import terminal
from experiments.study.analysis import formatting
from experiments.study.analysis.results import Report, Row
from experiments.study.report.styles import LIGHT, Styles

WIDTH = 360  # width of every figure
LINE = 17  # height of a line of text
# The width of an average character in DejaVu Sans, which is wider than a page's fonts.
# Texts are broken by this estimate, because the layout needs the lines first.
CHARACTER = 6.1
TIED = "\u00a0"  # a space without a line break
TIPS, MOST_TIPS = "tips", 40  # the id of tooltips, and their number on a line
SIGN = 36  # width of a line's sample in a legend, with the space beside it
DOTTED = {"color": LIGHT["muted"], "linewidth": 1, "linestyle": (0, (1, 2))}

WORDS = {
    "plain": formatting.number,
    "bytes": terminal.size,
    "time": formatting.duration,
}


class Plot(NamedTuple):
    """A figure's drawing function and the texts about it.

    Attributes:
        name: name of its file.
        group: the section that shows it: answer, sweep, measure, loss, time, replicas,
            more or tuning.
        title: its subject, with the unit.
        text: a description for readers who cannot see it.
        note: a caption, such as which lines are not drawn; "" for none.
        draw: function that makes the figure.
        folded: the heading that it is folded under; "" if it is always shown.
    """

    name: str
    group: str
    title: str
    text: str
    note: str
    draw: Callable[[], Figure]
    folded: str = ""


class Range(NamedTuple):
    """The ends of an axis, its scale, and its kind: plain, bytes or time."""

    low: float
    high: float
    log: bool = False
    kind: str = "plain"

    def widened(self, room: float) -> "Range":
        """Returns the range with a fraction of it added at each end."""
        low, high, log, _ = self
        if log:
            factor = (high / low) ** room if high > low else 1.5
            return self._replace(low=low / factor, high=high * factor)
        margin = room * (high - low) or 0.5
        return self._replace(low=low - margin, high=high + margin)


class Line(NamedTuple):
    """A line of a chart, with arrays of equal length.

    Attributes:
        label: label of the algorithm.
        point: value of the sweep; "" puts the line in all panels.
        x: the x values.
        y: the y values, NaN for gaps.
        low: the lower end of the band; y for no band.
        high: the upper end of the band.
        tips: the tooltips of the points.
        every: the distance between markers, in points.
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
        title: the title, with the unit.
        x_label: the quantity of the x axis.
        x: the range of the x axis.
        y: the range of the y axis.
        lines: the lines, in the order of the legend.
        styles: styles by label.
        labels: texts of the legend by label; a line without one is not in the legend.
        target: the y value of a horizontal line, and its text.
        bars: whether to draw bands as error bars.
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


def plain(text: str) -> str:
    """Replaces control characters and line ends, for which no font has a glyph."""
    return "".join(c if c.isprintable() or c == TIED else " " for c in text)


def titled(name: str, unit: str) -> str:
    """Returns a name with a capital letter, and its unit if it has one."""
    return formatting.sentence(f"{name} ({unit})" if unit else name)


def wrapped(text: str, width: float, character: float = CHARACTER) -> list[str]:
    """Splits text into lines of a width; a longer word ends in an ellipsis."""
    tied = re.sub(r"(?<=\d) (?=[a-zA-Zµ%])", TIED, plain(text))  # 30 ms, 1 of 5
    most = max(int(width / character), 8)
    # A flag such as --outer-lr stays one word.
    lines = textwrap.wrap(tied, most, break_on_hyphens=False, break_long_words=False)
    return [x if len(x) <= most else f"{x[: most - 1]}…" for x in lines] or [""]


def extent(lines: Sequence[Line]) -> Range:
    """Returns the range of y from the lowest to the highest end of the bands."""
    low = min(float(line.low.min()) for line in lines)
    return Range(low, max(float(line.high.max()) for line in lines))


def line_of_rows(
    report: Report, rows: Sequence[Row], x: Sequence[float], tips: Sequence[str]
) -> Line:
    """Returns an algorithm's final means, with a standard deviation to either side."""
    spreads = [row.measure for row in rows if row.measure]
    y = np.array([s.mean for s in spreads]) * report.measure.scale
    around = np.array([s.deviation or 0.0 for s in spreads]) * report.measure.scale
    return Line(rows[0].label, "", np.array(x), y, y - around, y + around, tips)


def panels(
    title: str, heads: Sequence[str], x_label: str, height: float
) -> tuple[Figure, list[Axes]]:
    """Makes a figure of panels of equal height, one below the other.

    Args:
        title: the title, with the unit.
        heads: titles of the panels; [""] for a single one.
        x_label: the quantity of all x axes, and its unit.
        height: the height of a panel, in units.
    """
    # An average bold character is wider than a plain one.
    lines = wrapped(title, WIDTH - 20, CHARACTER * 1.15)
    below = wrapped(x_label, WIDTH * 0.8)
    # The layout divides the figure's height, but does not choose it.
    tall = sum(height + (LINE + 8 if head else 8) for head in heads)
    tall += LINE * (len(lines) + len(below)) + 40
    figure = Figure(figsize=(WIDTH / 72, tall / 72), dpi=72, layout="constrained")
    figure.suptitle("\n".join(lines), x=10 / WIDTH, ha="left")
    axes = list(figure.subplots(len(heads), sharex=True, squeeze=False)[:, 0])
    for each, head in zip(axes, heads, strict=True):
        each.set_title(plain(head))
    axes[-1].set_xlabel("\n".join(below))
    return figure, axes


def scale(axes: Axes, name: str, ends: Range, most: int = 5) -> None:
    """Sets the ends of axis x or y, and at most `most` ticks at round numbers."""
    low, high, log, kind = ends
    axis = axes.xaxis if name == "x" else axes.yaxis
    axes.set(**{f"{name}scale": "log" if log else "linear", f"{name}lim": (low, high)})
    ticks = (log_ticks if log else linear_ticks)(kind, low, high, most)
    axis.set_ticks(ticks, [WORDS[kind](tick) for tick in ticks])
    # Logarithmic axes would add ticks without labels.
    axis.set_minor_locator(NullLocator())


def linear_ticks(kind: str, low: float, high: float, most: int) -> list[float]:
    """Returns numbers that are round in their label's unit: 1.5 min, not 100 s."""
    # The numbers are round in the largest unit of their labels.
    units = (length for bound, _, length in terminal.DURATIONS if high < bound)
    unit = next(units) if kind == "time" else 1
    locator = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10])
    ticks = [float(x) * unit for x in locator.tick_values(low / unit, high / unit)]
    return [x for x in ticks if low <= x <= high]


def log_ticks(kind: str, low: float, high: float, most: int) -> list[float]:
    """Returns two or more round numbers, as many as `most` allows."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    tens, threes, dense = (
        [x * 10.0**k for k in decades for x in steps]
        for steps in ((1,), (1, 3), (1, 2, 5))
    )
    if kind == "time":
        # matplotlib has no axis of durations: decades of seconds, then minutes.
        tens = [x for x in tens if x <= 10] + [60, 600, 3600, 36000]
        tens += [86400 * 10.0**k for k in range(6)]
        threes = dense = sorted({*tens, *(3 * x for x in tens if x < 36000)} - {30})
    for ticks in (dense, threes, tens, tens[::2], tens[::3], tens[::4]):
        inside = [x for x in ticks if low <= x <= high]
        if len(inside) <= most:
            break
    # A short range holds at most one round number of a decade.
    return inside if len(inside) > 1 else linear_ticks(kind, low, high, most)


def legend_texts(report: Report) -> dict[str, str]:
    """Returns the texts of a legend: labels, and how many of their runs diverged."""
    texts = {}
    for label in dict.fromkeys(row.label for row in report.rows):
        rows = [row for row in report.rows if row.label == label]
        lost, runs = sum(r.diverged for r in rows), sum(r.seeds for r in rows)
        texts[label] = f"{label} ({lost} of {runs} diverged)" if lost else label
    return texts


def draw_chart(chart: Chart) -> Figure:
    """Draws a panel per value of the sweep; lines that are not swept are in all."""
    points = list(dict.fromkeys(line.point for line in chart.lines if line.point))
    heads = [formatting.point_text(point) for point in points] or [""]
    height = 150 if len(points) > 1 else 210
    figure, panes = panels(chart.title, heads, chart.x_label, height)
    for point, axes in zip(points or [""], panes, strict=True):
        scale(axes, "x", chart.x)
        scale(axes, "y", chart.y)
        for line in (x for x in chart.lines if x.point in (point, "")):
            draw_line(axes, line, chart)
        if chart.target:
            axes.axhline(chart.target[0], **DOTTED)
    add_legend(figure, chart)
    return figure


def add_legend(figure: Figure, chart: Chart) -> None:
    """Adds a legend below the panels, and its height to the figure's."""
    drawn = {line.label for line in chart.lines}
    signs = {
        text: Line2D([], [], **chart.styles[label])
        for label, text in chart.labels.items()
        if label in drawn
    }
    if chart.target and chart.y.low < chart.target[0] < chart.y.high:
        signs[chart.target[1]] = Line2D([], [], **DOTTED)
    longest = max(map(len, signs), default=0) * CHARACTER + SIGN
    legend = figure.legend(
        [*signs.values()],
        ["\n".join(wrapped(text, WIDTH - 20 - SIGN)) for text in signs],
        loc="outside lower left",
        ncols=max(1, int((WIDTH - 20) / longest)),
    )
    # The layout would take the legend's room from the panels.
    room = legend.get_window_extent().height
    figure.set_figheight(figure.get_figheight() + room / 72)


def draw_line(axes: Axes, line: Line, chart: Chart) -> None:
    """Draws a line, its band and its tips."""
    style = chart.styles[line.label]
    x = np.where(line.x > 0, line.x, np.nan) if chart.x.log else line.x
    if chart.bars:
        deviations = [line.y - line.low, line.high - line.y]
        axes.errorbar(x, line.y, deviations, elinewidth=1.2, **style)
    else:
        band = {"color": style["color"], "alpha": 0.16, "linewidth": 0}
        axes.fill_between(x, line.low, line.high, **band)
        # Markers of different lines start at different evaluations, so that lines that
        # coincide stay distinguishable.
        order = list(chart.styles)
        first = int(order.index(line.label) / len(order) * line.every)
        axes.plot(x, line.y, markevery=(first, line.every), **style)
    inside = (x >= chart.x.low) & (x <= chart.x.high) & (line.y <= chart.y.high)
    seen = np.flatnonzero(inside & (line.y >= chart.y.low))
    # Counted from the end: the last value is what a reader looks for.
    chosen = seen[:: -(-(-len(seen) // MOST_TIPS) or 1)][::-1]
    add_tips(axes, x[chosen], line.y[chosen], [line.tips[int(i)] for i in chosen])


def add_tips(axes: Axes, x: Any, y: Any, texts: Sequence[str]) -> None:
    """Adds invisible markers, which become circles with tooltips in an SVG."""
    # A line outside the axes has no tips. For an empty label matplotlib would make up
    # one.
    if texts:
        axes.plot(x, y, "o", alpha=0, gid=TIPS, label="\n".join(map(plain, texts)))
