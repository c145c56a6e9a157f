"""The figures over the runs: a metric against steps, bytes or time."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.cli.terminal import size
from experiments.study.analysis.claims import fixed, places_of
from experiments.study.analysis.formatting import (
    duration,
    named,
    number,
    sentence,
    target,
)
from experiments.study.analysis.quantities import (
    Quantity,
    View,
    is_empty,
    quantities,
    views_of,
)
from experiments.study.analysis.results import Report
from experiments.study.report.axes import (
    NARROW,
    End,
    Plot,
    add_tips,
    label_ends,
    panels,
    scale,
    titled,
    with_lost,
)
from experiments.study.report.styles import LIGHT, Styles

MOST_TIPS = 40  # on a line

Limits = tuple[float, float, bool]  # low and high end of an axis, whether it is a log


class Line(NamedTuple):
    """A curve in the units of its figure: arrays of one length, NaN for gaps."""

    label: str
    point: str
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """Every metric against steps; the compared ones against bytes and time, too."""
    views = views_of(report)
    for quantity in quantities(report):
        # One range of y in all views: a figure then changes in x alone.
        limits = limits_of(quantity, lines_of(report, quantity, views[0]))
        if limits is None or is_empty(report, quantity):
            continue
        many = quantity.group in ("measure", "loss") and quantity.key != "train_loss"
        found = (
            plot(report, quantity, view, limits, styles)
            for view in (views if many else views[:1])
        )
        yield from (each for each in found if each)


def lines_of(report: Report, quantity: Quantity, view: View) -> list[Line]:
    """The curves with a figure to show."""
    lines = []
    for curve in report.curves:
        band, x = curve.bands.get(quantity.key), view.values(curve)
        if band and x:
            mean, low, high = (finite(y) * quantity.scale for y in band)
            lines += [Line(curve.label, curve.point, finite(x), mean, low, high)]
    return [line for line in lines if np.isfinite(line.mean).any()]


def finite(values: Sequence[float | None]) -> np.ndarray:
    """An array with NaN for missing and infinite values."""
    array = np.array(values, float)  # None becomes NaN
    return np.where(np.isfinite(array), array, np.nan)


def limits_of(quantity: Quantity, lines: Sequence[Line]) -> Limits | None:
    """The range of y that shows the differences; None without a line.

    The first quarter of a run may begin outside, where all figures are far from those
    that are compared. So may a run that diverges.
    """
    if not lines:
        return None
    settled = [settled_part(line) for line in lines]
    fence = np.inf if quantity.bounded else fence_of([mean for mean, *_ in settled])
    rows = np.concatenate(settled, axis=1)
    rows = rows[:, rows[0] <= fence]  # false for gaps
    low, high = float(np.nanmin(rows)), float(np.nanmax(rows[rows <= 2 * fence]))
    positive = rows[0][rows[0] > 0]
    if quantity.log and len(positive) and positive.max() > 50 * positive.min():
        return float(positive.min() / 1.5), float(positive.max() * 1.5), True
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 0.5
    if rows[0].min() >= 0 and low < max(0.2 * high, margin):
        return 0.0, high + margin, False
    return low - margin, high + margin, False


def fence_of(means: Sequence[np.ndarray]) -> float:
    """The value that only diverging lines exceed.

    That is far from the best line by the measure of its own extent.
    """
    fences = []
    for mean in means:
        middle, extent = np.nanmedian(mean), np.nanmax(mean) - np.nanmin(mean)
        fences += [float(middle + 8 * max(extent, abs(middle) / 2))]
    return min((fence for fence in fences if fence > 0), default=np.inf)


def settled_part(line: Line) -> np.ndarray:
    """Mean, low and high after the first quarter of the steps, as rows."""
    late = line.x >= 0.25 * np.nanmax(line.x)
    rows = np.stack([line.mean, line.low, line.high])
    return rows[:, late] if np.isfinite(line.mean[late]).any() else rows


def plot(
    report: Report, quantity: Quantity, view: View, limits: Limits, styles: Styles
) -> Plot | None:
    """A metric against steps, bytes or time; None without a positive x."""
    lines = lines_of(report, quantity, view)
    log = is_log(view, lines)
    low, high, _ = limits
    seen = [
        line.x[(line.mean >= low) & (line.mean <= high)] if log else line.x
        for line in lines
    ]
    xs = np.concatenate([*seen, []])
    xs = xs[xs > 0] if log else xs
    if not (xs > 0).any():
        return None
    x_limits = float(np.nanmin(xs)), float(np.nanmax(xs)), log
    name, large = sentence(quantity.name), quantity.group in ("measure", "loss")
    title = f"{titled(name, quantity.unit)} {view.title}"
    text = f"{title}, mean and standard deviation over the seeds. "
    return Plot(
        f"{quantity.key} by {view.slug}",
        quantity.group,
        title,
        f"{text}At the end: {last_figures(lines, quantity)}.",
        note(report, quantity, view, lines, limits, log),
        partial(draw, report, quantity, view, lines, x_limits, limits, styles, title),
        large and not view.folded,
        name,
        view.title,
        view.folded,
    )


def is_log(view: View, lines: Sequence[Line]) -> bool:
    """Bytes are drawn on a logarithmic axis, and times that differ much."""
    last = [float(np.nanmax(line.x)) for line in lines]
    if view.kind == "time":
        return bool(last) and min(last) > 0 and max(last) > 4 * min(last)
    return view.kind == "bytes" and max(last, default=0) > 0


def last_figures(lines: Sequence[Line], quantity: Quantity) -> str:
    """The last figure of each line, in words."""
    texts = []
    for line in lines:
        last = line.mean[np.isfinite(line.mean)][-1]
        value = f"{number(float(f'{last:.4g}'))} {quantity.unit}".rstrip()
        texts.append(f"{named(line.label, line.point)} {value}")
    return ", ".join(texts)


def note(
    report: Report,
    quantity: Quantity,
    view: View,
    lines: Sequence[Line],
    limits: Limits,
    log: bool,
) -> str:
    """Names all that the figure leaves out."""
    _, high, log_y = limits
    texts: dict[str, list[str]] = {}
    for line in lines:
        own = texts.setdefault(line.label, [])
        if log and not (line.x > 0).any():
            own.append(f"{view.name}: 0, so not on this axis")
        elif log_y and not (line.mean > 0).any():
            own.append("0 throughout, so not on this axis")
        elif (line.mean[-(len(line.mean) // 2 + 1) :] > high).any():
            own.append("leaves the picture at the top")
    for curve in report.curves:
        if quantity.key in curve.bands and curve.label not in texts:
            texts[curve.label] = [f"{view.name}: not known"]
    each = [
        f"{label}: {'; '.join(dict.fromkeys(x))}" for label, x in texts.items() if x
    ]
    return ". ".join(each) + "." if each else ""


def draw(
    report: Report,
    quantity: Quantity,
    view: View,
    lines: Sequence[Line],
    x_limits: Limits,
    y_limits: Limits,
    styles: Styles,
    title: str,
    width: float,
) -> Figure:
    """Draws a panel a point of the sweep; what is not swept is in all of them."""
    points = list(dict.fromkeys(line.point for line in lines))
    points = [point for point in points if point] or points
    labels = {line.label: with_lost(report, line.label) for line in lines}
    goal = None if quantity.group != "measure" else report.target
    goal_text = f"target {target(report)}"
    below = view.name + " (log)" * x_limits[2]
    every = [*labels.values()] + [goal_text] * (goal is not None)
    figure, axes = panels(title, points, report.sweep, below, width, every)
    most = 3 if width == NARROW else 8
    ends: dict[Axes, list[End]] = {}
    for point, each in zip(points, axes, strict=True):
        scale(each.xaxis, view.kind, *x_limits, room=0.03, most=most)
        scale(each.yaxis, "plain", *y_limits)
        own = [line for line in lines if line.point in (point, "")]
        drawn = [draw_line(each, x, quantity, view, styles) for x in own]
        ends[each] = [
            (x, y, labels[label], s) for x, y, label, s in filter(None, drawn)
        ]
        if goal is not None:
            ends[each] += draw_target(each, goal * quantity.scale, goal_text)
    label_ends(figure, ends)
    return figure


def draw_line(
    axes: Axes, line: Line, quantity: Quantity, view: View, styles: Styles
) -> End | None:
    """Draws a mean, its band and its tips; returns its end, None if it has no part."""
    style, order = styles[line.label], list(styles)
    log, (low, high) = axes.get_xscale() == "log", axes.get_ylim()
    x = np.where(line.x > 0, line.x, np.nan) if log else line.x
    # Markers of different lines start at different evaluations: lines that lie on each
    # other stay distinguishable.
    every = max(1, len(x) // 8)
    first = int(order.index(line.label) / len(order) * every)
    axes.fill_between(
        x, line.low, line.high, color=style["color"], alpha=0.16, linewidth=0
    )
    axes.plot(x, line.mean, markevery=(first, every), **style)
    add_line_tips(axes, line, quantity, view)
    drawn = np.flatnonzero(np.isfinite(line.mean) & np.isfinite(x))
    if not len(drawn):
        return None
    return (
        x[drawn[-1]],
        float(np.clip(line.mean[drawn[-1]], low, high)),
        line.label,
        style,
    )


def draw_target(axes: Axes, y: float, text: str) -> list[End]:
    """Draws a line across and returns its end, if it lies within the axes."""
    low, high = axes.get_ylim()
    if not low < y < high:
        return []
    style = {"color": LIGHT["muted"]}
    axes.axhline(y, linewidth=1, linestyle=(0, (1, 2)), **style)
    return [(axes.get_xlim()[1], y, text, style)]


def add_line_tips(axes: Axes, line: Line, quantity: Quantity, view: View) -> None:
    """Adds the figures at the visible evaluations, the last among them."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    inside = (line.x >= left) & (line.x <= right)
    seen = np.flatnonzero(inside & (line.mean >= low) & (line.mean <= high))
    chosen = seen[:: -(-(-len(seen) // MOST_TIPS) or 1)][::-1]
    texts = [
        f"{line.label}: {figure_text(line, i, quantity)} {at(view, line.x[i])}"
        for i in chosen
    ]
    add_tips(axes, list(line.x[chosen]), list(line.mean[chosen]), texts)


def figure_text(line: Line, i: int, quantity: Quantity) -> str:
    """The mean at an evaluation, and the deviation if there is one."""
    mean, deviation = line.mean[i], line.high[i] - line.mean[i]
    text = f"{mean:.4g}"
    if deviation > 0:
        places = places_of(deviation)
        text = f"{fixed(mean, places)} ± {fixed(deviation, places)}"
    return f"{text} {quantity.unit}".rstrip()


def at(view: View, x: float) -> str:
    """A place on the axis in words: "after 480 local steps"."""
    words = {"bytes": size, "time": duration}.get(view.kind)
    return f"after {words(x)}" if words else f"after {x:,.0f} {view.name}"
