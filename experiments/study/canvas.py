"""Where the parts of a figure lie, and how lines, axes and labels look.

A figure is 340 units wide, about a phone's width, and so is its text: a unit is a CSS
pixel there. Everything is placed by hand, so that the same data give the same bytes.
"""

import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from experiments.screen import size
from experiments.study.amounts import duration, number

WIDTH = 340
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 8, 25
LINE = 17  # of text
TIED = "\u00a0"  # a space at which no line breaks
ROUND = [1, 2, 2.5, 5, 10]
CHARACTER = 6.1  # of a label, on average

PAPER = "#ffffff"
INK = "#1c2024"
MUTED = "#59616d"
GRID = "#e3e6ea"

# Told apart by eyes without one kind of cone too: ΔE of any two is 11 or more after
# Machado's simulations. report.css holds their partners for dark pages.
COLOURS = (
    "#0067b1",
    "#c43c00",
    "#009268",
    "#8f2f8f",
    "#b98700",
    "#3b95d8",
    "#30343a",
    "#e0609f",
)
DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (10, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

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


class Look(NamedTuple):
    """Of one algorithm, in every figure: as matplotlib takes it."""

    colour: str
    dash: Any
    marker: str


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """Gives each algorithm a colour, a line style and a marker of its own."""
    return {
        label: Look(
            COLOURS[i % len(COLOURS)],
            DASHES[(i + i // len(COLOURS)) % len(DASHES)],
            MARKERS[i % len(MARKERS)],
        )
        for i, label in enumerate(labels)
    }


def plain(text: str) -> str:
    """Without what no font has: control characters and line ends."""
    return "".join(c if c.isprintable() or c == TIED else " " for c in text)


def canvas(
    title: str,
    keys: dict[str, Look],
    panels: Sequence[str],
    height: float,
    x_label: str,
    left: float = LEFT,
) -> tuple[Figure, list[Axes]]:
    """Makes a figure with a title, a legend and panels one under the other.

    Args:
        title: in words, with the unit.
        keys: the legend; empty for none.
        panels: what stands above each; "" where there is one.
        height: of a panel's axes, units.
        x_label: what the last panel's axis shows.
        left: of the axes, units.

    Returns:
        The figure and the axes of its panels.
    """
    lines = wrapped(title, WIDTH - 20, CHARACTER * 1.15)
    legend = arranged(keys)
    above = [LINE + 5 if text else 0 for text in panels]
    gaps = 26 * (len(panels) - 1)
    tall = TOP + LINE * len(lines) + legend_height(legend) + 10
    below = wrapped(x_label, WIDTH - left - RIGHT)
    tall += sum(above) + height * len(panels) + gaps + BOTTOM + LINE * len(below)
    figure = Figure(figsize=(WIDTH / 72, tall / 72), dpi=72, facecolor=PAPER)
    y = TOP
    for line in lines:
        write(figure, 10, y, line, weight="bold", size=12)
        y += LINE
    y = draw_legend(figure, legend, y + 3) + 7
    axes = []
    for text, space in zip(panels, above, strict=True):
        if text:
            write(figure, left, y - 2, text, color=MUTED)
        y += space
        box = (left / WIDTH, 1 - (y + height) / tall, 0, height / tall)
        axes.append(bare_axes(figure, box, (WIDTH - left - RIGHT) / WIDTH))
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
    """The text in lines of so many units."""
    tied = re.sub(r"(?<=\d) (?=[a-zA-Zµ%])", TIED, plain(text))  # 30 ms, 1 of 5
    most = max(int(width / character), 8)
    return textwrap.wrap(tied, most, break_on_hyphens=False) or [""]


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


def arranged(keys: dict[str, Look]) -> list[list[tuple[float, Look, list[str]]]]:
    """The legend's rows: x, look and lines of each of its entries."""
    if not keys:
        return []
    room = WIDTH - 20
    widest = max(36 + CHARACTER * len(label) for label in keys)
    columns = max(1, min(3, int(room / widest)))
    entries = [
        (10 + i % columns * room / columns, look, wrapped(label, room / columns - 34))
        for i, (label, look) in enumerate(keys.items())
    ]
    return [entries[i : i + columns] for i in range(0, len(entries), columns)]


def legend_height(rows: list[list[tuple[float, Look, list[str]]]]) -> float:
    """Of the legend, units."""
    return sum(LINE * max(len(lines) for *_, lines in row) for row in rows)


def draw_legend(
    figure: Figure, rows: list[list[tuple[float, Look, list[str]]]], y: float
) -> float:
    """Draws the legend from y on; returns where it ends."""
    width, height = figure.get_size_inches() * 72
    for row in rows:
        for x, look, lines in row:
            middle = 1 - (y + 7.5) / height
            for marker, ends in (("", (x, x + 24)), (look.marker, (x + 12,))):
                sample = Line2D(
                    [end / width for end in ends],
                    [middle] * len(ends),
                    color=look.colour,
                    linestyle="" if marker else look.dash,
                    marker=marker,
                    markeredgewidth=0,
                )
                figure.add_artist(sample)
            for i, line in enumerate(lines):
                write(figure, x + 30, y + i * LINE, line)
        y += LINE * max(len(lines) for *_, lines in row)
    return y


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
    ticks = log_ticks(kind, low, high) if log else linear_ticks(kind, low, high)
    words = {"plain": number, "bytes": size, "time": duration}[kind]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [words(tick) for tick in ticks])


def linear_ticks(kind: str, low: float, high: float) -> list[float]:
    """Round figures, round in the unit in which they are shown."""
    unit = 1.0
    if kind == "time":
        lengths = ((2 * 86400, 86400), (3600, 3600), (60, 60), (1, 1), (1e-3, 1e-3))
        unit = next((float(length) for least, length in lengths if high >= least), 1e-6)
    ticks = MaxNLocator(5, steps=ROUND).tick_values(low / unit, high / unit)
    return [x * unit for x in map(float, ticks) if low <= x * unit <= high]


def log_ticks(kind: str, low: float, high: float) -> list[float]:
    """Two to five round figures."""
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
        if len(inside) <= 5:
            break
    return inside if len(inside) > 1 else linear_ticks(kind, low, high)


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


class Drawing(NamedTuple):
    """A figure and what is said of it.

    Attributes:
        figure: as matplotlib draws it.
        title: what it shows.
        text: what is seen, for who cannot see it.
        note: what to know beside it, such as what could not be drawn; "" for nothing.
        group: under which heading it stands: answer, measure, loss, replicas, more or
            tuning.
    """

    figure: Figure
    title: str
    text: str
    note: str
    group: str
