"""Names at the ends of lines, one above the other."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.study.report.canvas import CHARACTER, INK, MUTED, wrapped, write
from experiments.study.report.styles import Look

HEIGHT, GAP = 13, 3  # of a line of a name, and between two names, units
LEADER, SIGN = 12, 14  # from the axes to a name: what leads there, and its marker


class End(NamedTuple):
    """The end of a line.

    Attributes:
        x: units from the figure's left end.
        y: units from its top.
        name: what the line shows.
        look: how it is drawn; None for a line that is no algorithm's.
    """

    x: float
    y: float
    name: str
    look: Look | None


def lines_of(name: str, width: float) -> list[str]:
    """The lines of a name beside a figure of a width."""
    return wrapped(name, min(0.38 * width, 200) - LEADER - SIGN, CHARACTER)


def column(names: Sequence[str], width: float) -> float:
    """The part of a figure's width that names take, units."""
    longest = max(len(line) for name in names for line in lines_of(name, width))
    return LEADER + SIGN + CHARACTER * 1.05 * longest + 4


def tall(names: Sequence[str], width: float) -> float:
    """The part of its height that they take, units."""
    return sum(HEIGHT * len(lines_of(name, width)) + GAP for name in names)


def draw_names(axes: Axes, ends: Sequence[End]) -> None:
    """Writes each name to the right of the axes, as near its line's end as can be."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches() * 72
    box = axes.get_position()
    right, low, high = box.x1 * width, (1 - box.y1) * height, (1 - box.y0) * height
    texts = [lines_of(end.name, width) for end in ends]
    at = [min(max(end.y, low), high) for end in ends]
    middles = spread_out(at, [HEIGHT * len(x) + GAP for x in texts], low - 6, high + 6)
    for end, y, middle, lines in zip(ends, at, middles, texts, strict=True):
        colour, x = end.look.colour if end.look else MUTED, right + LEADER
        path = [(min(end.x + 4, right), y), (right, y), (x, middle)]
        leader = {"linewidth": 0.8, "alpha": 0.6, "linestyle": "-"}
        marker = end.look.marker if end.look else ""
        sign = {"linestyle": "", "marker": marker, "markeredgewidth": 0}
        for points, style in ((path, leader), ([(x + SIGN / 2, middle)], sign)):
            xs, ys = zip(*points, strict=True)
            figure.add_artist(
                Line2D(
                    [each / width for each in xs],
                    [1 - each / height for each in ys],
                    color=colour,
                    **style,
                )
            )
        top = middle - HEIGHT * len(lines) / 2
        for i, line in enumerate(lines):
            write(figure, x + SIGN, top + HEIGHT * i, line, INK if end.look else MUTED)


def spread_out(
    wanted: Sequence[float], heights: Sequence[float], low: float, high: float
) -> list[float]:
    """The middles of boxes that do not overlap, as near to those wanted as can be.

    Boxes keep the order of what is wanted. They lie between low and high where there is
    room for all of them.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # How far each box lies below a stack of those before it: it must not decrease.
    offsets: list[tuple[float, int]] = []  # a mean, and of how many
    stack = 0.0
    for i in order:
        offsets.append((wanted[i] - heights[i] / 2 - stack, 1))
        stack += heights[i]
        while len(offsets) > 1 and offsets[-2][0] > offsets[-1][0]:
            (a, m), (b, n) = offsets[-2:]
            offsets[-2:] = [((a * m + b * n) / (m + n), m + n)]
    each = [offset for offset, count in offsets for _ in range(count)]
    middles, stack = [0.0] * len(wanted), 0.0
    for i, offset in zip(order, each, strict=True):
        offset = max(min(offset, high - sum(heights)), low)
        middles[i] = stack + offset + heights[i] / 2
        stack += heights[i]
    return middles
