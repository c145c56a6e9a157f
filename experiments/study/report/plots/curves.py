"""The figures over the runs: a metric against steps, bytes or time."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from experiments.study.analysis import formatting
from experiments.study.analysis.formatting import around
from experiments.study.analysis.quantities import (
    Quantity,
    View,
    is_empty,
    quantities,
    views_of,
)
from experiments.study.analysis.results import Report
from experiments.study.report.charts import (
    WORDS,
    Chart,
    Line,
    Plot,
    Range,
    draw_chart,
    legend_texts,
    titled,
)
from experiments.study.report.styles import Styles


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """Every metric against steps; the compared ones against bytes and time, too."""
    views = views_of(report)
    for quantity in quantities(report):
        # One range of y in all views: charts of a metric then differ in x alone.
        y = range_of(quantity, lines_of(report, quantity, views[0]))
        if y is None or is_empty(report, quantity):
            continue
        many = quantity.group in ("measure", "loss") and quantity.key != "train_loss"
        shown = views if many else views[:1]
        found = (plot(report, quantity, view, y, styles) for view in shown)
        yield from filter(None, found)


def lines_of(report: Report, quantity: Quantity, view: View) -> list[Line]:
    """The curves with a figure to show."""
    lines = []
    for curve in report.curves:
        band, x = curve.bands.get(quantity.key), view.values(curve)
        if not band or not x:
            continue
        at = finite(x)
        mean, low, high = (finite(values) * quantity.scale for values in band)
        tips = [
            f"{curve.label}: {around(y, deviation, quantity.unit)} {place(view, x)}"
            for y, deviation, x in zip(mean, high - mean, at, strict=True)
        ]
        every = max(1, len(at) // 8)
        lines += [Line(curve.label, curve.point, at, mean, low, high, tips, every)]
    return [line for line in lines if np.isfinite(line.y).any()]


def finite(values: Sequence[float | None]) -> np.ndarray:
    """An array with NaN for missing and infinite values."""
    # None becomes NaN.
    array = np.array(values, float)
    return np.where(np.isfinite(array), array, np.nan)


def place(view: View, x: float) -> str:
    """A place on the axis in words: "after 480 local steps"."""
    steps = f"{x:,.0f} {view.name}"
    return f"after {steps if view.kind == 'plain' else WORDS[view.kind](x)}"


def range_of(quantity: Quantity, lines: Sequence[Line]) -> Range | None:
    """The range of y that shows the differences; None without a line.

    The first quarter of a run may begin outside, where all figures are far from those
    that are compared. So may a run that diverges.
    """
    if not lines:
        return None
    settled = [settled_part(line) for line in lines]
    fence = np.inf if quantity.bounded else fence_of([mean for mean, *_ in settled])
    rows = np.concatenate(settled, axis=1)
    # The comparison is false for gaps, too.
    rows = rows[:, rows[0] <= fence]
    low, high = float(np.nanmin(rows)), float(np.nanmax(rows[rows <= 2 * fence]))
    positive = rows[0][rows[0] > 0]
    if quantity.log and len(positive) and positive.max() > 50 * positive.min():
        return Range(float(positive.min() / 1.5), float(positive.max() * 1.5), True)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 0.5
    if rows[0].min() >= 0 and low < max(0.2 * high, margin):
        return Range(0.0, high + margin)
    return Range(low - margin, high + margin)


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
    rows = np.stack([line.y, line.low, line.high])
    return rows[:, late] if np.isfinite(line.y[late]).any() else rows


def plot(
    report: Report, quantity: Quantity, view: View, y: Range, styles: Styles
) -> Plot | None:
    """A metric against steps, bytes or time; None without a positive x."""
    lines = lines_of(report, quantity, view)
    x = x_range(view, lines, y)
    if x is None:
        return None
    title = f"{titled(quantity.name, quantity.unit)} {view.title}"
    target = None
    if report.target is not None and quantity.group == "measure":
        text = f"target {formatting.target(report)}"
        target = report.target * quantity.scale, text
    below, labels = view.name + " (log)" * x.log, legend_texts(report)
    chart = Chart(title, below, x.widened(0.03), y, lines, styles, labels, target)
    return Plot(
        f"{quantity.key} by {view.slug}",
        quantity.group,
        title,
        f"{title}, mean and standard deviation over the seeds. At the end: "
        f"{', '.join(last_figure(line, quantity) for line in lines)}.",
        note(report, quantity, view, chart),
        partial(draw_chart, chart),
        formatting.sentence(quantity.name) if view.folded else "",
    )


def x_range(view: View, lines: Sequence[Line], y: Range) -> Range | None:
    """The range of x in which lines are seen; None without a positive x.

    Bytes are on a logarithmic axis, as one algorithm sends tens of times what another
    sends, and times that differ much.
    """
    last = [float(np.nanmax(line.x)) for line in lines] or [0.0]
    log = view.kind == "bytes" or (
        view.kind == "time" and 0 < 4 * min(last) < max(last)
    )
    # A logarithmic axis would spend decades on what lies outside the range of y.
    seen = [
        line.x[(line.x > 0) & (line.y >= y.low) & (line.y <= y.high)] if log else line.x
        for line in lines
    ]
    xs = np.concatenate([*seen, []])
    if not (xs > 0).any():
        return None
    return Range(float(np.nanmin(xs)), float(np.nanmax(xs)), log, view.kind)


def last_figure(line: Line, quantity: Quantity) -> str:
    """The last figure of a line, in words."""
    last = float(f"{line.y[np.isfinite(line.y)][-1]:.4g}")
    value = f"{formatting.number(last)} {quantity.unit}".rstrip()
    return f"{formatting.named(line)} {value}"


def note(report: Report, quantity: Quantity, view: View, chart: Chart) -> str:
    """Names all that the figure leaves out: a missing line is no missing run."""
    texts = [(line.label, reason(line, chart, view)) for line in chart.lines]
    drawn = {label for label, _ in texts}
    texts += [
        (curve.label, f"{view.name}: not known")
        for curve in report.curves
        if quantity.key in curve.bands and curve.label not in drawn
    ]
    notes = dict.fromkeys(f"{label}: {text}" for label, text in texts if text)
    return ". ".join(notes) + "." if notes else ""


def reason(line: Line, chart: Chart, view: View) -> str:
    """Why a line, or a part of it, is not seen; "" if it is."""
    if chart.x.log and not (line.x > 0).any():
        return f"{view.name}: 0, so not on this axis"
    if chart.y.log and not (line.y > 0).any():
        return "0 throughout, so not on this axis"
    if (line.y[-(len(line.y) // 2 + 1) :] > chart.y.high).any():
        return "leaves the picture at the top"
    return ""
