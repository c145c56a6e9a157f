"""The figures over the runs: a metric against steps, bytes or time."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.cli.terminal import size
from experiments.study.analysis.claims import fixed, places_of
from experiments.study.analysis.formatting import (
    duration,
    named,
    number,
    point_text,
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
from experiments.study.report.axes import Line, limits_of, line_of, visible
from experiments.study.report.canvas import (
    MUTED,
    NARROW,
    Drawing,
    Plan,
    Point,
    canvas,
    place,
    set_x,
    set_y,
)
from experiments.study.report.comparisons import names_of
from experiments.study.report.line_labels import End, column, draw_names, tall
from experiments.study.report.styles import Look

MOST_POINTS = 40  # of a line that tell their figure


def plans(report: Report, look: dict[str, Look]) -> Iterator[Plan]:
    """Every metric against steps, the compared ones against bytes and time too."""
    views = views_of(report)
    for quantity in quantities(report):
        limits = limits_of(quantity, report.curves)
        if limits is None or is_empty(report, quantity):
            continue
        large = quantity.group in ("measure", "loss")
        for view in views if large and quantity.key != "train_loss" else views[:1]:
            yield Plan(
                f"{quantity.key} by {view.slug}",
                partial(over_runs, report, quantity, view, limits, look),
                large and not view.folded,
            )


def over_runs(
    report: Report,
    quantity: Quantity,
    view: View,
    limits: tuple[float, float, bool],
    look: dict[str, Look],
    width: float,
) -> Drawing | None:
    """Draws a metric against steps, bytes or time, a panel for each swept value."""
    having = [c for c in report.curves if quantity.key in c.bands]
    placed = [(c, x) for c in having if (x := view.values(c))]
    lines = [line_of(c, quantity, x) for c, x in placed]
    lines = [line for line in lines if np.isfinite(line.mean).any()]
    log = log_wanted(view, lines) if lines else False
    seen = [visible(line, limits) if log else line.x for line in lines]
    xs = np.concatenate([*seen, []])
    if not (xs > 0).any():
        return None
    names = names_of(report, [line.curve.label for line in lines])
    unit = f" ({quantity.unit})" if quantity.unit else ""
    title = f"{sentence(quantity.name)}{unit} {view.title}"
    figure, panels = axes_of(report, quantity, view, lines, title, width)
    told: list[Point] = []
    for point, axes in panels.items():
        set_x(axes, view.kind, np.nanmin(xs), np.nanmax(xs), log)
        set_y(axes, *limits)
        # What is not swept is beside every value of it.
        here = [line for line in lines if line.curve.point in (point, "")]
        for line in here:
            draw_line(axes, line, look[line.curve.label], list(look), log)
            told += points_of(axes, line, quantity, view)
        ends = [end_of(axes, x, log, look, names) for x in here]
        ends.append(draw_target(axes, report, quantity))
        draw_names(axes, [end for end in ends if end])
    missing = {c.label for c in having} - names.keys()
    note = notes(view, lines, missing, limits, log)
    text = f"{title}, mean and standard deviation over the seeds. "
    text += f"At the end: {last_figures(lines, quantity)}."
    subject = sentence(quantity.name)
    about = view.title, subject, view.folded
    return Drawing(figure, title, text, note, quantity.group, told, *about)


def axes_of(
    report: Report,
    quantity: Quantity,
    view: View,
    lines: Sequence[Line],
    title: str,
    width: float,
) -> tuple[Figure, dict[str, Axes]]:
    """A figure with room for the names, and its axes by the swept value."""
    points = list(dict.fromkeys(line.curve.point for line in lines))
    points = [point for point in points if point] or points
    names = list(names_of(report, [line.curve.label for line in lines]).values())
    names += [goal] if (goal := target_text(report, quantity)) else []
    least = {1: 180 if width == NARROW else 360}.get(len(points), 130)
    height, right = max(least, tall(names, width)), column(names, width)
    below = view.name + " (log)" * log_wanted(view, lines)
    above = [point_text(point) for point in points]
    figure, axes = canvas(title, above, height, below, width, right=right)
    return figure, dict(zip(points, axes, strict=True))


def log_wanted(view: View, lines: Sequence[Line]) -> bool:
    """Bytes are shown on a logarithmic axis, and times where they differ much."""
    last = [float(np.nanmax(line.x)) for line in lines]
    if view.kind == "time":
        return min(last) > 0 and max(last) > 4 * min(last)
    return view.kind == "bytes" and max(last) > 0


def draw_line(
    axes: Axes, line: Line, look: Look, order: Sequence[str], log: bool
) -> None:
    """Draws the mean, its markers and the band around it."""
    x = np.where(line.x > 0, line.x, np.nan) if log else line.x
    every = max(1, len(x) // 8)
    turn = order.index(line.curve.label) / max(len(order), 1)
    axes.fill_between(
        x, line.low, line.high, color=look.colour, alpha=0.16, linewidth=0
    )
    axes.plot(
        x,
        line.mean,
        color=look.colour,
        linestyle=look.linestyle,
        marker=look.marker,
        markevery=(int(turn * every), every),
        markeredgewidth=0,
    )


def target_text(report: Report, quantity: Quantity) -> str:
    """The name of the line at the target; "" where there is none."""
    if report.target is None or quantity.group != "measure":
        return ""
    return f"target {target(report)}"


def draw_target(axes: Axes, report: Report, quantity: Quantity) -> End | None:
    """A line across, if it lies within the picture, and the end where it is named."""
    text = target_text(report, quantity)
    y, (low, high) = (report.target or 0.0) * quantity.scale, axes.get_ylim()
    if not text or not low < y < high:
        return None
    axes.axhline(y, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
    return End(*place(axes, axes.get_xlim()[1], y), text, None)


def notes(
    view: View,
    lines: Sequence[Line],
    missing: set[str],
    limits: tuple[float, float, bool],
    log: bool,
) -> str:
    """Words for all that the picture leaves out."""
    _, high, log_y = limits
    told: dict[str, list[str]] = {}
    for line in lines:
        about = told.setdefault(line.curve.label, [])
        if log and not (line.x > 0).any():
            about.append(f"{view.name}: 0, so not on this axis")
        elif log_y and not (line.mean > 0).any():
            about.append("0 throughout, so not on this axis")
        elif (line.mean[-(len(line.mean) // 2 + 1) :] > high).any():
            about.append("leaves the picture at the top")
    for label in missing:
        told.setdefault(label, []).append(f"{view.name}: not known")
    each = [f"{label}: {'; '.join(dict.fromkeys(x))}" for label, x in told.items() if x]
    return ". ".join(each) + "." if each else ""


def last_figures(lines: Sequence[Line], quantity: Quantity) -> str:
    """The last figure of each line, in words."""
    texts = []
    for line in lines:
        finite = line.mean[np.isfinite(line.mean)]
        value = f"{number(float(f'{finite[-1]:.4g}'))} {quantity.unit}".rstrip()
        texts.append(f"{named(line.curve.label, line.curve.point)} {value}")
    return ", ".join(texts)


def end_of(
    axes: Axes, line: Line, log: bool, look: dict[str, Look], names: dict[str, str]
) -> End | None:
    """The end of a line; None if no part of it is on the axes."""
    drawn = np.isfinite(line.mean) & ((line.x > 0) | (not log))
    if not drawn.any():
        return None
    last = int(np.flatnonzero(drawn)[-1])
    label, (low, high) = line.curve.label, axes.get_ylim()
    x, y = place(axes, line.x[last], min(max(line.mean[last], low), high))
    return End(x, y, names[label], look[label])


def points_of(axes: Axes, line: Line, quantity: Quantity, view: View) -> list[Point]:
    """The figures at the evaluations that are seen."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    inside = (line.x >= left) & (line.x <= right)
    seen = np.flatnonzero(inside & (line.mean >= low) & (line.mean <= high))
    every = -(-len(seen) // MOST_POINTS) or 1
    return [
        Point(
            *place(axes, line.x[i], line.mean[i]),
            f"{line.curve.label}: {figure_of(line, i, quantity)} {at(view, line.x[i])}",
        )
        for i in map(int, seen[::-1][::every][::-1])
    ]


def figure_of(line: Line, i: int, quantity: Quantity) -> str:
    """The mean at an evaluation, and the deviation where there is one."""
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
