"""Where the parts of a figure lie, and how axes and text look.

A figure is as wide as a phone or as a page, in units that are CSS pixels there, and its
text is as large as theirs. Everything is placed by hand, so that the same data give the
same bytes.
"""

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from experiments.cli.terminal import size
from experiments.study.analysis.formatting import duration, number

NARROW, WIDE = 340, 960
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 8, 25
LINE = 17  # of text
TIED = "\u00a0"  # a space at which no line breaks
ROUND = [1, 2, 2.5, 5, 10]
CHARACTER = 6.1  # of a label, on average

PAPER = "#ffffff"
INK = "#1c2024"
MUTED = "#59616d"
GRID = "#e3e6ea"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "text.color": INK,
    "text.parse_math": False,  # a label may hold dollars
    "axes.formatter.use_mathtext": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "path.simplify": True,
}


class Point(NamedTuple):
    """A place in a figure that tells what is there when it is pointed at.

    Attributes:
        x: units from the figure's left end.
        y: units from its top.
        text: what is there.
    """

    x: float
    y: float
    text: str


class Drawing(NamedTuple):
    """A figure and what is said of it.

    Attributes:
        figure: as matplotlib draws it.
        title: what it shows.
        text: what is seen, for who cannot see it.
        note: what to know beside it, such as what could not be drawn; "" for nothing.
        group: under which heading it stands: answer, sweep, measure, loss, replicas,
            more or tuning.
        points: places that tell what is there.
        view: against what it is drawn, in a word or two; "" where there is one way.
        subject: what it shows, whatever it is drawn against.
        folded: shown only when it is asked for.
    """

    figure: Figure
    title: str
    text: str
    note: str
    group: str
    points: Sequence[Point] = ()
    view: str = ""
    subject: str = ""
    folded: bool = False


class Plan(NamedTuple):
    """A figure to be drawn.

    Attributes:
        name: of its file.
        draw: makes it of a width in units; None if there is nothing to see.
        large: whether it is shown as wide as the page.
    """

    name: str
    draw: Callable[[float], Drawing | None]
    large: bool = False


def plain(text: str) -> str:
    """Without what no font has: control characters and line ends."""
    return "".join(c if c.isprintable() or c == TIED else " " for c in text)


def canvas(
    title: str,
    panels: Sequence[str],
    height: float,
    x_label: str,
    width: float,
    left: float = LEFT,
    right: float = RIGHT,
) -> tuple[Figure, list[Axes]]:
    """Makes a figure with a title and panels one under the other.

    Args:
        title: in words, with the unit.
        panels: what stands above each; "" where there is one.
        height: of a panel's axes, units.
        x_label: what the last panel's axis shows.
        width: of the figure, units.
        left: of the axes, units.
        right: of them, for labels at the ends of lines.

    Returns:
        The figure and the axes of its panels.
    """
    lines = wrapped(title, width - 20, CHARACTER * 1.15)
    above = [LINE + 5 if text else 0 for text in panels]
    gaps = 26 * (len(panels) - 1)
    below = wrapped(x_label, width - left - right)
    tall = TOP + LINE * len(lines) + 10 + sum(above) + height * len(panels) + gaps
    tall += BOTTOM + LINE * len(below)
    figure = Figure(figsize=(width / 72, tall / 72), dpi=72, facecolor=PAPER)
    y = TOP
    for line in lines:
        write(figure, 10, y, line, weight="bold", size=12)
        y += LINE
    y += 10
    axes = []
    for text, space in zip(panels, above, strict=True):
        if text:
            write(figure, left, y - 2, text, color=MUTED)
        y += space
        box = (left / width, 1 - (y + height) / tall, 0, height / tall)
        axes.append(bare_axes(figure, box, (width - left - right) / width))
        y += height + 26
    axes[-1].set_xlabel("\n".join(below), color=MUTED, fontsize=11, labelpad=6)
    for other in axes[:-1]:
        other.tick_params(labelbottom=False)
    return figure, axes


def bare_axes(figure: Figure, box: tuple[float, ...], width: float) -> Axes:
    """Axes with a line below and horizontal lines behind the data."""
    axes = figure.add_axes((box[0], box[1], width, box[3]), facecolor="none")
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.tick_params(length=0, labelsize=11, labelcolor=MUTED, pad=5)
    axes.tick_params(axis="x", length=3, color=MUTED)
    return axes


def wrapped(text: str, width: float, character: float = CHARACTER) -> list[str]:
    """The text in lines of so many units; a word that is longer ends in an ellipsis."""
    tied = re.sub(r"(?<=\d) (?=[a-zA-Zµ%])", TIED, plain(text))  # 30 ms, 1 of 5
    most = max(int(width / character), 8)
    lines = textwrap.wrap(
        tied, most, break_on_hyphens=False, break_long_words=False
    ) or [""]
    return [line if len(line) <= most else f"{line[: most - 1]}…" for line in lines]


def in_one_line(text: str, width: float) -> str:
    """The text as far as it fits, with an ellipsis for the rest."""
    first, *rest = wrapped(text, width)
    return f"{first} …" if rest else first


def place(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """The place of a point of the data: units from the figure's top left corner."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    across, up = axes.transData.transform((x, y))
    return float(across), float(figure.get_size_inches()[1] * 72 - up)


def write(
    figure: Figure,
    x: float,
    y: float,
    text: str,
    color: str = INK,
    weight: str = "normal",
    size: float = 11,
) -> None:
    """Text whose top left corner lies x, y units from the figure's."""
    width, height = figure.get_size_inches() * 72
    # The baseline, not the top, is where an SVG places text.
    at = (x / width, 1 - (y + size) / height)
    look = {"color": color, "weight": weight, "size": size, "va": "baseline"}
    figure.text(*at, plain(text), **look)


def set_x(
    axes: Axes, kind: str, low: float, high: float, log: bool, room: float = 0.03
) -> None:
    """Sets limits, ticks and their labels in words.

    Args:
        axes: whose x axis it is.
        kind: plain, bytes or time.
        low: the least that is drawn.
        high: the most.
        log: whether the axis is logarithmic.
        room: at each end, as a part of the whole.
    """
    if log:
        margin = (high / low) ** room if high > low else 1.5
        low, high = low / margin, high * margin
        axes.set_xscale("log")
    else:
        margin = room * (high - low) or 0.5
        low, high = low - margin, high + margin
    axes.set_xlim(low, high)
    most = min(max(int(units(axes) / 50), 2), 8)
    ticks = (log_ticks if log else linear_ticks)(kind, low, high, most)
    words = {"plain": number, "bytes": size, "time": duration}[kind]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [words(tick) for tick in ticks])


def units(axes: Axes) -> float:
    """The width of axes, units."""
    return place(axes, axes.get_xlim()[1], 0)[0] - place(axes, axes.get_xlim()[0], 0)[0]


def linear_ticks(kind: str, low: float, high: float, most: int) -> list[float]:
    """Round figures, round in the unit in which they are shown."""
    unit = 1.0
    if kind == "time":
        lengths = ((2 * 86400, 86400), (3600, 3600), (60, 60), (1, 1), (1e-3, 1e-3))
        unit = next((float(length) for least, length in lengths if high >= least), 1e-6)
    ticks = MaxNLocator(most, steps=ROUND).tick_values(low / unit, high / unit)
    return [x * unit for x in map(float, ticks) if low <= x * unit <= high]


def log_ticks(kind: str, low: float, high: float, most: int = 5) -> list[float]:
    """Two or more round figures, and no more than so many where that can be."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    tens = [10.0**k for k in decades]
    threes = [x * 10.0**k for k in decades for x in (1, 3)]
    dense = [x * 10.0**k for k in decades for x in (1, 2, 5)]
    if kind == "time":
        tens = [x for x in tens if x <= 10] + [60, 600, 3600, 36000]
        tens += [86400 * 10.0**k for k in range(6)]
        threes = sorted({*tens, *(3 * x for x in tens if x < 36000)} - {30})
        dense = threes
    for ticks in (dense, threes, tens, tens[::2], tens[::3], tens[::4]):
        inside = [x for x in ticks if low <= x <= high]
        if len(inside) <= most:
            break
    return inside if len(inside) > 1 else linear_ticks(kind, low, high, most)


def set_y(axes: Axes, low: float, high: float, log: bool, scale: float = 1.0) -> None:
    """Sets limits and ticks; what is drawn is multiplied by the scale already."""
    if log:
        axes.set_yscale("log")
        ticks = log_ticks("plain", low, high)
    else:
        ticks = MaxNLocator(5, steps=ROUND).tick_values(low, high)
        ticks = [float(x) for x in ticks if low <= x <= high]
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, [number(x) for x in ticks])
