"""Charts of lines: bands around them, tooltips, and labels at their ends."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, OffsetFrom
from scipy.optimize import isotonic_regression

from experiments.study.analysis import formatting
from experiments.study.analysis.results import Report
from experiments.study.report.axes import NARROW, Range, panels, plain, scale, wrapped
from experiments.study.report.styles import LIGHT, Styles

TIPS, MOST_TIPS = "tips", 40  # the mark of tooltips, and their number on a line
LABEL_LINE, GAP = 13.2, 3  # heights: of a label's line, between labels
LEADER, SIGN = 12, 14  # widths between the axes and a label: the leader, the marker


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
        labels: texts at the ends of lines, by label; a line without one has none.
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


def end_labels(report: Report) -> dict[str, str]:
    """The texts at the ends of lines: labels, and how many of their runs diverged."""
    gone = {row.label: formatting.lost(report, row.label) for row in report.rows}
    return {label: f"{label} ({x})" if x else label for label, x in gone.items()}


def draw_chart(chart: Chart, width: float) -> Figure:
    """Draws a panel a point of the sweep; what is not swept is in all of them."""
    points = list(dict.fromkeys(line.point for line in chart.lines if line.point))
    shown = {line.label for line in chart.lines}
    texts = [text for label, text in chart.labels.items() if label in shown]
    texts += [chart.target[1]] if chart.target else []
    # Labels of many algorithms are taller than the usual panel.
    stack = sum(LABEL_LINE * len(text_lines(x, width)) + GAP for x in texts)
    usual = 130 if len(points) > 1 else 180 if width == NARROW else 360
    heads = [formatting.point_text(point) for point in points] or [""]
    figure, axes = panels(chart.title, heads, chart.x_label, width, max(usual, stack))
    for point, each in zip(points or [""], axes, strict=True):
        scale(each, "x", chart.x, 3 if width == NARROW else 8)
        scale(each, "y", chart.y)
        for line in chart.lines:
            draw_line(each, line, chart, point)
        draw_target(each, chart)
    place_labels(figure)
    return figure


def draw_line(axes: Axes, line: Line, chart: Chart, point: str) -> None:
    """Draws a line of a point, its band, its tips and its label."""
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
    for i in np.flatnonzero(np.isfinite(line.y) & np.isfinite(x))[-1:]:
        end = float(x[i]), float(line.y[i])
        if line.label in chart.labels:
            add_label(axes, *end, chart.labels[line.label], style)


def draw_target(axes: Axes, chart: Chart) -> None:
    """Draws a line across, if there is a target within the axes."""
    if chart.target and chart.y.low < chart.target[0] < chart.y.high:
        y, text = chart.target
        style = {"color": LIGHT["muted"]}
        axes.axhline(y, linewidth=1, linestyle=(0, (1, 2)), **style)
        add_label(axes, axes.get_xlim()[1], y, text, style)


def add_tips(axes: Axes, x: Any, y: Any, texts: Sequence[str]) -> None:
    """Adds unseen markers, which become circles with tooltips in an SVG."""
    # A line outside the axes has no tips: without markers, matplotlib would put a
    # label of its own in place of an empty one.
    if texts:
        axes.plot(x, y, "o", alpha=0, gid=TIPS, label="\n".join(map(plain, texts)))


def text_lines(text: str, width: float) -> list[str]:
    """The lines of a label beside the axes of a figure of a width."""
    return wrapped(text, min(0.38 * width, 200) - LEADER - SIGN)


def add_label(axes: Axes, x: float, y: float, text: str, style: dict[str, Any]) -> None:
    """Adds a label right of the axes, a marker and a leader from the end of a line."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    axes.annotate(
        "\n".join(text_lines(text, 72 * figure.get_figwidth())),
        (x, y),
        (LEADER + SIGN, 0),
        textcoords=OffsetFrom(axes.bbox, (1, 0.5), "points"),
        va="center",
        annotation_clip=False,
        color=LIGHT["ink" if "marker" in style else "muted"],
    )
    leader = Line2D(
        [],
        [],
        # In inches: pixels would be others at a PNG's resolution.
        transform=figure.dpi_scale_trans,
        color=(style["color"], 0.6),
        linewidth=0.8,
        marker=style.get("marker", ""),
        markerfacecolor=style["color"],
        markevery=[3],
        in_layout=False,
    )
    figure.add_artist(leader)


def place_labels(figure: Figure) -> None:
    """Moves all labels as near to the ends of their lines as can be."""
    # The layout makes room for the labels; then it rests, as moving them must not
    # move the axes that they are placed by.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    leaders = iter(figure.artists)
    for axes in figure.axes:
        box, labels = axes.bbox, [x for x in axes.texts if isinstance(x, Annotation)]
        ends = [axes.transData.transform(label.xy) for label in labels]
        ys = [float(np.clip(y, box.y0, box.y1)) for _, y in ends]
        heights = [label.get_window_extent().height + GAP for label in labels]
        moved = spread_out(ys, heights, box.y0 - 6, box.y1 + 6)
        for label, (x, _), y, middle in zip(labels, ends, ys, moved, strict=True):
            label.set_position((LEADER + SIGN, middle - (box.y0 + box.y1) / 2))
            right, sign = box.x1, box.x1 + LEADER + SIGN / 2
            xs = np.array([min(x + 4, right), right, right + LEADER, sign])
            path = xs / 72, np.array([y, y, middle, middle]) / 72
            cast(Line2D, next(leaders)).set_data(*path)


def spread_out(
    wanted: Sequence[float], heights: Sequence[float], low: float, high: float
) -> np.ndarray:
    """Moves the middles of boxes apart, each as little as can be.

    Boxes keep their order. They lie between low and high where all of them have room.
    """
    order = np.argsort(wanted, kind="stable")
    sizes = np.asarray(heights, float)[order]
    below = np.cumsum(sizes) - sizes
    # Boxes do not overlap if their distances to a stack without gaps never decrease.
    offsets = isotonic_regression(np.asarray(wanted)[order] - sizes / 2 - below).x
    offsets = np.clip(offsets, low, max(high - sizes.sum(), low))
    middles = np.empty(len(sizes))
    middles[order] = offsets + below + sizes / 2
    return middles
