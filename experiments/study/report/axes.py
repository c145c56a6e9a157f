"""Figures in matplotlib's layout: panels, axes in words, labels at the ends of lines.

A figure is as wide as a phone or as a page, in units of 1/72 inch that are CSS pixels
there: at 72 dots per inch a unit is matplotlib's point and its pixel, too.
"""

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator
from scipy.optimize import isotonic_regression

from experiments.cli.terminal import size
from experiments.study.analysis.formatting import duration, lost, number, point_text
from experiments.study.analysis.results import Report
from experiments.study.report.styles import LIGHT

NARROW, WIDE = 340, 960
LINE, LABEL_LINE, GAP = 17, 13.2, 3  # heights: of text, of a label, between labels
LEADER, SIGN = 12, 14  # widths between the axes and a label: the leader, the marker
CHARACTER = 6.1  # width of an average character
TIED = "\u00a0"  # a space without a line break
TIPS = "tips"

WORDS = {"plain": number, "bytes": size, "time": duration}
# The shortest time that is shown in a unit, and the unit; both in seconds.
TIME_UNITS = ((172800, 86400), (3600, 3600), (60, 60), (1, 1), (1e-3, 1e-3), (0, 1e-6))

End = tuple[float, float, str, dict[str, Any]]  # of a line: x, y, label and style


class Plot(NamedTuple):
    """A figure's drawing function and the words about it.

    Attributes:
        name: of its file.
        group: its heading: answer, sweep, measure, loss, replicas, more or tuning.
        title: its subject, with the unit.
        text: a description for readers who cannot see it.
        note: a caption, such as what could not be drawn; "" for none.
        draw: makes the figure from a width in units.
        large: drawn as wide as the page, too.
        subject: the quantity without the view.
        view: the title of what it is drawn against; "" if there is one way only.
        folded: shown on demand.
    """

    name: str
    group: str
    title: str
    text: str
    note: str
    draw: Callable[[float], Figure]
    large: bool = False
    subject: str = ""
    view: str = ""
    folded: bool = False


def plain(text: str) -> str:
    """Replaces control characters and line ends, for which no font has a glyph."""
    return "".join(c if c.isprintable() or c == TIED else " " for c in text)


def wrapped(text: str, width: float, character: float = CHARACTER) -> list[str]:
    """Splits text into lines of a width; a longer word ends in an ellipsis."""
    tied = re.sub(r"(?<=\d) (?=[a-zA-Zµ%])", TIED, plain(text))  # 30 ms, 1 of 5
    most = max(int(width / character), 8)
    lines = textwrap.wrap(
        tied, most, break_on_hyphens=False, break_long_words=False
    ) or [""]
    return [line if len(line) <= most else f"{line[: most - 1]}…" for line in lines]


def label_lines(label: str, width: float) -> list[str]:
    """The lines of a label beside the axes of a figure of a width."""
    return wrapped(label, min(0.38 * width, 200) - LEADER - SIGN)


def titled(name: str, unit: str) -> str:
    """A name and its unit, if it has one."""
    return f"{name} ({unit})" if unit else name


def with_lost(report: Report, label: str) -> str:
    """A label with the number of runs that diverged."""
    diverged = lost(report, label)
    return f"{label} ({diverged})" if diverged else label


def panels(
    title: str,
    points: Sequence[str],
    sweep: str,
    x_label: str,
    width: float,
    labels: Sequence[str] = (),
    height: float = 0.0,
) -> tuple[Figure, list[Axes]]:
    """Makes a figure of a panel a point of the sweep, one below the other.

    Args:
        title: with the unit.
        points: values of the sweep, such as "workers=4"; [""] without a sweep.
        sweep: the swept flag.
        x_label: the quantity of the last panel's x axis, and its unit.
        width: of the figure, units.
        labels: texts for `label_ends`, which need their height.
        height: of a panel, units; 0 for the usual one.
    """
    usual = 130 if len(points) > 1 else 180 if width == NARROW else 360
    stack = sum(LABEL_LINE * len(label_lines(x, width)) + GAP for x in labels)
    lines = wrapped(title, width - 20, CHARACTER * 1.15)
    below = wrapped(x_label, width / 2 if labels else width - 40)
    heads = [
        point_text(x) if x or not any(points) else f"without {sweep}" for x in points
    ]
    tall = sum(max(height or usual, stack) + (LINE + 8 if x else 8) for x in heads)
    tall += LINE * (len(lines) + len(below)) + 40
    figure = Figure(figsize=(width / 72, tall / 72), dpi=72, layout="constrained")
    figure.suptitle("\n".join(lines), x=10 / width, ha="left")
    axes = list(figure.subplots(len(points), sharex=True, squeeze=False)[:, 0])
    for each, head in zip(axes, heads, strict=True):
        each.set_title(plain(head))
    axes[-1].set_xlabel("\n".join(below))
    return figure, axes


def scale(
    axis: Axis,
    kind: str,
    low: float,
    high: float,
    log: bool = False,
    room: float = 0.0,
    most: int = 5,
) -> None:
    """Sets an axis' limits, and ticks at round figures with labels in words.

    Args:
        axis: axes.xaxis or axes.yaxis.
        kind: plain, bytes or time.
        low: the smallest value.
        high: the largest value.
        log: whether the axis is logarithmic.
        room: the part of the axis left free at each end.
        most: ticks.
    """
    if log:
        margin = (high / low) ** room if high > low else 1.5
        low, high = low / margin, high * margin
    else:
        margin = room * (high - low) or (0.5 if low == high else 0)
        low, high = low - margin, high + margin
    name = axis.axis_name
    limits = {f"{name}scale": "log" if log else "linear", f"{name}lim": (low, high)}
    axis.axes.set(**limits)
    ticks = (log_ticks if log else linear_ticks)(kind, low, high, most)
    axis.set_ticks(ticks, [WORDS[kind](tick) for tick in ticks])
    axis.set_minor_locator(NullLocator())


def linear_ticks(kind: str, low: float, high: float, most: int) -> list[float]:
    """Round figures in the unit of their labels: 90 s is no round time, 1.5 min is."""
    unit = next(u for least, u in TIME_UNITS if high >= least) if kind == "time" else 1
    locator = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10])
    ticks = locator.tick_values(low / unit, high / unit) * unit
    return [float(x) for x in ticks if low <= x <= high]


def log_ticks(kind: str, low: float, high: float, most: int) -> list[float]:
    """Two or more round figures, as dense as `most` allows."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    tens, threes, dense = (
        [x * 10.0**k for k in decades for x in steps]
        for steps in ((1,), (1, 3), (1, 2, 5))
    )
    if kind == "time":  # round in seconds, then in minutes, hours and days
        tens = [x for x in tens if x <= 10] + [60, 600, 3600, 36000]
        tens += [86400 * 10.0**k for k in range(6)]
        threes = sorted({*tens, *(3 * x for x in tens if x < 36000)} - {30})
        dense = threes
    for ticks in (dense, threes, tens, tens[::2], tens[::3], tens[::4]):
        inside = [x for x in ticks if low <= x <= high]
        if len(inside) <= most:
            break
    return inside if len(inside) > 1 else linear_ticks(kind, low, high, most)


def add_tips(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], texts: Sequence[str]
) -> None:
    """Adds unseen markers, which `svg.pictures` turns into circles with a tooltip."""
    label = "\n".join(map(plain, texts))
    axes.plot(xs, ys, "o", alpha=0, gid=TIPS, label=label)


def label_ends(figure: Figure, ends: Mapping[Axes, Sequence[End]]) -> None:
    """Writes labels right of the axes, as near the ends of their lines as can be."""
    width = 72 * figure.get_figwidth()
    texts = {
        (axes, i): axes.annotate(
            "\n".join(label_lines(label, width)),
            (1, 0.5),
            (LEADER + SIGN, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            color=LIGHT["ink" if "marker" in style else "muted"],
        )
        for axes, own in ends.items()
        for i, (_, _, label, style) in enumerate(own)
    }
    # The layout makes room for the labels; then it rests, as moving them must not
    # move the axes that they were placed by.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes, own in ends.items():
        box = axes.bbox
        at = np.array([axes.transData.transform(end[:2]) for end in own]).reshape(-1, 2)
        wanted = np.clip(at[:, 1], box.y0, box.y1)
        heights = [
            texts[axes, i].get_window_extent().height + GAP for i in range(len(own))
        ]
        middles = spread_out(wanted, heights, box.y0 - 6, box.y1 + 6)
        for i, (y, middle) in enumerate(zip(wanted, middles, strict=True)):
            texts[axes, i].set_position((LEADER + SIGN, middle - (box.y0 + box.y1) / 2))
            start = min(at[i, 0] + 4, box.x1)
            xs = [start, box.x1, box.x1 + LEADER, box.x1 + LEADER + SIGN / 2]
            add_leader(figure, xs, [y, y, middle, middle], own[i][3])


def add_leader(
    figure: Figure, xs: Sequence[float], ys: Sequence[float], style: dict[str, Any]
) -> None:
    """Draws a thin line from the end of a line to its label, with its marker."""
    figure.add_artist(
        Line2D(
            np.divide(xs, 72),
            np.divide(ys, 72),
            transform=figure.dpi_scale_trans,
            color=(style["color"], 0.6),
            linewidth=0.8,
            marker=style.get("marker", ""),
            markerfacecolor=style["color"],
            markevery=[len(xs) - 1],
        )
    )


def spread_out(
    wanted: Sequence[float] | np.ndarray,
    heights: Sequence[float],
    low: float,
    high: float,
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
