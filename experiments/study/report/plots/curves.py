"""Figures of a metric over the runs, against steps, bytes or time."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from experiments.study.analysis import formatting
from experiments.study.analysis.quantities import Quantity, is_empty, quantities
from experiments.study.analysis.results import Curve, Report
from experiments.study.report import charts
from experiments.study.report.charts import Chart, Line, Plot, Range, titled
from experiments.study.report.styles import Styles


class View(NamedTuple):
    """The x axis that a metric is drawn against.

    Attributes:
        slug: part of the file's name.
        name: name in words.
        title: addition to a title, such as "on 10 GbE".
        kind: kind of its tick labels: plain, bytes or time.
        network: the network on which time is modelled; "" for other kinds.
        folded: whether it is shown only on demand.
    """

    slug: str
    name: str
    title: str
    kind: str
    network: str = ""
    folded: bool = False

    def values(self, curve: Curve) -> Sequence[float] | None:
        """Returns the values at a curve's evaluations; None if they are not known."""
        if self.kind == "time":
            return curve.seconds.get(self.network)
        return curve.bytes_per_worker if self.kind == "bytes" else curve.steps


def views_of(report: Report) -> list[View]:
    """Returns steps, bytes, and the time on each network.

    Only the slowest network is unfolded, because bytes cost the most there.
    """
    # The last value of a curve is that of the whole run.
    most = {
        n.name: max(
            (c.seconds.get(n.name, [0.0])[-1] for c in report.curves), default=0
        )
        for n in report.networks
    }
    slowest = max(most, key=lambda name: most[name], default=None)
    return [
        View("steps", "local steps", "by steps", "plain"),
        View("bytes", "bytes sent by each worker", "by bytes sent", "bytes"),
        *(
            View(f"time {n}", "modelled time", f"on {n}", "time", n, n != slowest)
            for n in most
        ),
    ]


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """Yields every metric against steps; the compared ones against bytes and time."""
    views = views_of(report)
    for quantity in quantities(report):
        # The range of y is the same in all views: charts of a metric differ only in x.
        y = range_of(quantity, lines_of(report, quantity, views[0]))
        if y is None or is_empty(report, quantity):
            continue
        many = quantity.group in ("measure", "loss") and quantity.by.key != "train_loss"
        shown = views if many else views[:1]
        found = (plot(report, quantity, view, y, styles) for view in shown)
        yield from filter(None, found)


def lines_of(report: Report, quantity: Quantity, view: View) -> list[Line]:
    """Returns the lines of the curves that have a finite value."""
    lines, by, words = [], quantity.by, charts.WORDS[view.kind]
    for curve in report.curves:
        band, x = curve.bands.get(by.key), view.values(curve)
        if not band or not x:
            continue
        at = finite(x)
        mean, low, high = (finite(values) * by.scale for values in band)
        places = [
            f"{x:,.0f} {view.name}" if view.kind == "plain" else words(x) for x in at
        ]
        tips = [
            f"{curve.label}: {formatting.around(y, deviation, by.unit)} after {place}"
            for y, deviation, place in zip(mean, high - mean, places, strict=True)
        ]
        every = max(1, len(at) // 8)
        lines += [Line(curve.label, curve.point, at, mean, low, high, tips, every)]
    return [line for line in lines if np.isfinite(line.y).any()]


def finite(values: Sequence[float | None]) -> np.ndarray:
    """Returns an array with NaN for missing and infinite values."""
    # None becomes NaN.
    array = np.array(values, float)
    return np.where(np.isfinite(array), array, np.nan)


def range_of(quantity: Quantity, lines: Sequence[Line]) -> Range | None:
    """Returns the range of y that shows the differences; None without a line.

    The first quarter of a run may lie outside: its values are far from the final ones.
    So may a run that diverges: its distance from the best line is large compared with
    the extent of that line.
    """
    if not lines:
        return None
    settled, fence = [], np.inf
    for line in lines:
        rows = np.stack([line.y, line.low, line.high])
        late = line.x >= 0.25 * np.nanmax(line.x)
        rows = rows[:, late] if np.isfinite(line.y[late]).any() else rows
        settled.append(rows)
        middle, extent = np.nanmedian(rows[0]), np.nanmax(rows[0]) - np.nanmin(rows[0])
        most = float(middle + 8 * max(extent, abs(middle) / 2))
        if most > 0 and not quantity.by.higher_is_better:
            fence = min(fence, most)
    rows = np.concatenate(settled, axis=1)
    # The comparison is false for gaps (NaN), too.
    rows = rows[:, rows[0] <= fence]
    low, high = float(np.nanmin(rows)), float(np.nanmax(rows[rows <= 2 * fence]))
    positive = rows[0][rows[0] > 0]
    if quantity.log and len(positive) and positive.max() > 50 * positive.min():
        return Range(float(positive.min() / 1.5), float(positive.max() * 1.5), True)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 0.5
    if rows[0].min() >= 0 and low < max(0.2 * high, margin):
        return Range(0.0, high + margin)
    return Range(low - margin, high + margin)


def x_range(view: View, lines: Sequence[Line], y: Range) -> Range | None:
    """Returns the range of x in which lines are seen; None without a positive x.

    The axis is logarithmic for bytes, because one algorithm may send tens of times as
    many as another, and for times that differ much.
    """
    last = [float(np.nanmax(line.x)) for line in lines] or [0.0]
    log = view.kind == "bytes" or (
        view.kind == "time" and 0 < 4 * min(last) < max(last)
    )
    # A logarithmic axis would spend decades on values outside the range of y.
    seen = [
        line.x[(line.x > 0) & (line.y >= y.low) & (line.y <= y.high)] if log else line.x
        for line in lines
    ]
    xs = np.concatenate([*seen, []])
    if not (xs > 0).any():
        return None
    return Range(float(np.nanmin(xs)), float(np.nanmax(xs)), log, view.kind)


def plot(
    report: Report, quantity: Quantity, view: View, y: Range, styles: Styles
) -> Plot | None:
    """Returns a metric against steps, bytes or time; None without a positive x."""
    by, lines = quantity.by, lines_of(report, quantity, view)
    x = x_range(view, lines, y)
    if x is None:
        return None
    title = f"{titled(by.name, by.unit)} {view.title}"
    target = None
    if report.target is not None and quantity.group == "measure":
        target = report.target * by.scale, f"target {formatting.target(report)}"
    below, texts = view.name + " (log)" * x.log, charts.legend_texts(report)
    chart = Chart(title, below, x.widened(0.03), y, lines, styles, texts, target)
    last = [(line, line.y[np.isfinite(line.y)][-1]) for line in lines]
    ends = [
        f"{formatting.named(line)} {formatting.number(float(f'{end:.4g}'))} {by.unit}"
        for line, end in last
    ]
    return Plot(
        f"{by.key} by {view.slug}",
        quantity.group,
        title,
        f"{title}, mean and standard deviation over the seeds. At the end: "
        f"{', '.join(end.rstrip() for end in ends)}.",
        note(report, quantity, view, chart),
        partial(charts.draw_chart, chart),
        formatting.sentence(by.name) if view.folded else "",
    )


def note(report: Report, quantity: Quantity, view: View, chart: Chart) -> str:
    """Returns a caption that names the lines that the figure leaves out, and why."""
    drawn = {line.label for line in chart.lines}
    texts = [(line.label, reason(line, chart, view)) for line in chart.lines]
    texts += [
        (curve.label, f"{view.name}: not known")
        for curve in report.curves
        if quantity.by.key in curve.bands and curve.label not in drawn
    ]
    notes = dict.fromkeys(f"{label}: {text}" for label, text in texts if text)
    return ". ".join(notes) + "." if notes else ""


def reason(line: Line, chart: Chart, view: View) -> str:
    """Returns why a line, or a part of it, is not visible; "" if all of it is."""
    if chart.x.log and not (line.x > 0).any():
        return f"{view.name}: 0, so not on this axis"
    if chart.y.log and not (line.y > 0).any():
        return "0 throughout, so not on this axis"
    if (line.y[-(len(line.y) // 2 + 1) :] > chart.y.high).any():
        return "leaves the picture at the top"
    return ""
