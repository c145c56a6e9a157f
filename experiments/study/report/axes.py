"""Panels in matplotlib's layout, and axes with round figures in words.

A figure is as wide as a phone, in units of 1/72 inch that are CSS pixels there: at 72
dots per inch a unit is matplotlib's point and its pixel, too.
"""

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from experiments.cli import terminal
from experiments.study.analysis import formatting

WIDTH = 360  # of every figure
LINE = 17  # height of text
# The width of an average character in DejaVu Sans, which is wider than a page's fonts.
# Lines are broken by it, as the layout needs the lines before it can measure them.
CHARACTER = 6.1
TIED = "\u00a0"  # a space without a line break

WORDS = {
    "plain": formatting.number,
    "bytes": terminal.size,
    "time": formatting.duration,
}


class Plot(NamedTuple):
    """A figure's drawing function and the words about it.

    Attributes:
        name: of its file.
        group: its heading: answer, sweep, measure, loss, time, replicas, more or
            tuning.
        title: its subject, with the unit.
        text: a description for readers who cannot see it.
        note: a caption, such as what could not be drawn; "" for none.
        draw: makes the figure.
        folded: the heading that it is folded below; "" if it is shown at once.
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
        """Leaves a part of the axis free at each end."""
        low, high, log, _ = self
        if log:
            factor = (high / low) ** room if high > low else 1.5
            return self._replace(low=low / factor, high=high * factor)
        margin = room * (high - low) or 0.5
        return self._replace(low=low - margin, high=high + margin)


def plain(text: str) -> str:
    """Replaces control characters and line ends, for which no font has a glyph."""
    return "".join(c if c.isprintable() or c == TIED else " " for c in text)


def titled(name: str, unit: str) -> str:
    """A name and its unit, if it has one."""
    return f"{name} ({unit})" if unit else name


def wrapped(text: str, width: float, character: float = CHARACTER) -> list[str]:
    """Splits text into lines of a width; a longer word ends in an ellipsis."""
    tied = re.sub(r"(?<=\d) (?=[a-zA-Zµ%])", TIED, plain(text))  # 30 ms, 1 of 5
    most = max(int(width / character), 8)
    # A flag such as --outer-lr is one word, and stays one.
    lines = textwrap.wrap(tied, most, break_on_hyphens=False, break_long_words=False)
    return [x if len(x) <= most else f"{x[: most - 1]}…" for x in lines] or [""]


def panels(
    title: str, heads: Sequence[str], x_label: str, height: float
) -> tuple[Figure, list[Axes]]:
    """Makes a figure of panels of a height, one below the other.

    Args:
        title: with the unit.
        heads: titles of the panels; [""] for a single one.
        x_label: the quantity of all x axes, and its unit.
        height: of a panel, units.
    """
    # An average bold character is wider than a plain one.
    lines = wrapped(title, WIDTH - 20, CHARACTER * 1.15)
    below = wrapped(x_label, WIDTH * 0.8)
    # The layout divides a height that it does not choose.
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
    """Sets the ends of axis x or y, and at most so many ticks at round figures."""
    low, high, log, kind = ends
    axis = axes.xaxis if name == "x" else axes.yaxis
    axes.set(**{f"{name}scale": "log" if log else "linear", f"{name}lim": (low, high)})
    ticks = (log_ticks if log else linear_ticks)(kind, low, high, most)
    axis.set_ticks(ticks, [WORDS[kind](tick) for tick in ticks])
    # Logarithmic axes would add ticks without labels.
    axis.set_minor_locator(NullLocator())


def linear_ticks(kind: str, low: float, high: float, most: int) -> list[float]:
    """Figures that are round in the unit of their labels: 1.5 min, but not 100 s."""
    # Round in the largest unit that their labels have.
    units = (length for bound, _, length in terminal.DURATIONS if high < bound)
    unit = next(units) if kind == "time" else 1
    locator = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10])
    ticks = [float(x) * unit for x in locator.tick_values(low / unit, high / unit)]
    return [x for x in ticks if low <= x <= high]


def log_ticks(kind: str, low: float, high: float, most: int) -> list[float]:
    """Two or more round figures, as many as `most` allows."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    tens, threes, dense = (
        [x * 10.0**k for k in decades for x in steps]
        for steps in ((1,), (1, 3), (1, 2, 5))
    )
    if kind == "time":
        # matplotlib knows no time axis of lengths: decades of seconds, then minutes.
        tens = [x for x in tens if x <= 10] + [60, 600, 3600, 36000]
        tens += [86400 * 10.0**k for k in range(6)]
        threes = sorted({*tens, *(3 * x for x in tens if x < 36000)} - {30})
        dense = threes
    for ticks in (dense, threes, tens, tens[::2], tens[::3], tens[::4]):
        inside = [x for x in ticks if low <= x <= high]
        if len(inside) <= most:
            break
    # A short range holds one round figure of a decade, or none.
    return inside if len(inside) > 1 else linear_ticks(kind, low, high, most)
