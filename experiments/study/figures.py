"""The figures of a report, drawn with matplotlib: only import this to draw them."""

import re
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from experiments.study import comparisons
from experiments.study.amounts import named, number, point_text, sentence, target
from experiments.study.canvas import (
    MUTED,
    STYLE,
    Drawing,
    Look,
    canvas,
    looks,
    set_x,
    set_y,
)
from experiments.study.lines import Line, limits_of, line_of, visible
from experiments.study.quantities import Quantity, View, quantities, views_of
from experiments.study.results import Report


def draw(report: Report) -> dict[str, Drawing]:
    """Draws every figure that the report has data for.

    Returns:
        By names fit for files, in the order in which they are shown.
    """
    with matplotlib.rc_context(STYLE):
        look = looks(list(dict.fromkeys(row.label for row in report.rows)))
        drawn = comparisons.answers(report, look)
        views = views_of(report)
        for quantity in quantities(report):
            limits = limits_of(quantity, report.curves)
            against = views if quantity.group in ("measure", "loss") else views[:1]
            if quantity.key == "train_loss":
                against = views[:1]
            for view in against:
                drawing = over_runs(report, quantity, view, limits, look)
                if drawing:
                    drawn.append((f"{quantity.key} by {view.slug}", drawing))
        drawn += comparisons.tunings(report, look)
    names: dict[str, Drawing] = {}
    for name, drawing in drawn:
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        taken = sum(x == slug or x.startswith(f"{slug}--") for x in names)
        names[f"{slug}--{taken + 1}" if taken else slug] = drawing
    return names


def over_runs(
    report: Report,
    quantity: Quantity,
    view: View,
    limits: tuple[float, float, bool] | None,
    look: dict[str, Look],
) -> Drawing | None:
    """Draws a metric against steps, bytes or time, a panel for each swept value."""
    having = [c for c in report.curves if quantity.key in c.bands]
    placed = [(c, x) for c in having if (x := view.values(c))]
    lines = [line_of(c, quantity, x) for c, x in placed]
    lines = [line for line in lines if np.isfinite(line.mean).any()]
    if not lines or limits is None:
        return None
    log = log_wanted(view, lines)
    seen = [visible(line, limits) if log else line.x for line in lines]
    xs = np.concatenate(seen)
    if not (xs > 0).any():
        return None
    points = list(dict.fromkeys(line.curve.point for line in lines))
    points = [point for point in points if point] or points
    labels = {line.curve.label for line in lines}
    unit = f" ({quantity.unit})" if quantity.unit else ""
    title = f"{sentence(quantity.name)}{unit} {view.title}"
    keys = comparisons.keys_of(report, look, labels)
    height = 180 if len(points) == 1 else 130
    above = [point_text(point) for point in points]
    below = view.name + " (log)" * log
    figure, panels = canvas(title, keys, above, height, below)
    for axes, point in zip(panels, points, strict=True):
        set_x(axes, view.kind, np.nanmin(xs), np.nanmax(xs), log)
        set_y(axes, *limits)
        if report.target is not None and quantity.group == "measure":
            first = axes is panels[0]
            text = f"target {target(report)}" if first else ""
            draw_target(axes, report.target * quantity.scale, text)
        # What is not swept is beside every value of it.
        for line in (x for x in lines if x.curve.point in (point, "")):
            draw_line(axes, line, look[line.curve.label], list(look), log)
    missing = {c.label for c in having} - labels
    note = notes(view, lines, missing, limits, log)
    text = f"{title}, mean and standard deviation over the seeds. "
    text += f"At the end: {ends(lines, quantity)}."
    return Drawing(figure, title, text, note, quantity.group)


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
    every = max(1, len(x) // 6)
    turn = order.index(line.curve.label) / max(len(order), 1)
    axes.fill_between(
        x, line.low, line.high, color=look.colour, alpha=0.16, linewidth=0
    )
    axes.plot(
        x,
        line.mean,
        color=look.colour,
        linestyle=look.dash,
        marker=look.marker,
        markevery=(int(turn * every), every),
        markeredgewidth=0,
    )


def draw_target(axes: Axes, y: float, text: str) -> None:
    """A line across with a text above, if it lies within the picture."""
    low, high = axes.get_ylim()
    if not low < y < high:
        return
    axes.axhline(y, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        text,
        (0, y),
        (2, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=MUTED,
        fontsize=11,
    )


def notes(
    view: View,
    lines: Sequence[Line],
    missing: set[str],
    limits: tuple[float, float, bool],
    log: bool,
) -> str:
    """What the picture leaves out."""
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
    if not any((np.abs(line.mean) > 0).any() for line in lines):
        return "0 at every evaluation."
    each = [f"{label}: {'; '.join(dict.fromkeys(x))}" for label, x in told.items() if x]
    return ". ".join(each) + "." if each else ""


def ends(lines: Sequence[Line], quantity: Quantity) -> str:
    """The last figure of each line, in words."""
    texts = []
    for line in lines:
        finite = line.mean[np.isfinite(line.mean)]
        value = f"{number(float(f'{finite[-1]:.4g}'))} {quantity.unit}".rstrip()
        texts.append(f"{named(line.curve.label, line.curve.point)} {value}")
    return ", ".join(texts)
