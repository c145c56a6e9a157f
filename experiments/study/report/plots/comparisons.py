"""The figures of the ends of runs: differences to the baseline, and a sweep."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.study.analysis import formatting
from experiments.study.analysis.formatting import named, spread
from experiments.study.analysis.results import ONE_NOMINAL, Report, Row
from experiments.study.report import charts
from experiments.study.report.axes import (
    WIDTH,
    Plot,
    Range,
    panels,
    plain,
    scale,
    titled,
    wrapped,
)
from experiments.study.report.charts import Chart, Line
from experiments.study.report.styles import LIGHT, Styles
from experiments.study.statistics import Difference
from experiments.study.tuning import Tuning

Compared = Sequence[tuple[Row, Difference]]

ROW = 40  # height of an algorithm in the figure of differences, units
BARS = {"interval": "thick: 95 % interval", "sd": "thin: one deviation to each side"}
TOO_FEW = (
    "Thin bars are one standard deviation of the differences to each side: there are "
    "too few seeds for an interval."
)


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """The differences to the baseline, and the measure over a sweep."""
    pairs = [(row, row.comparison.difference) for row in report.rows]
    if compared := [(row, difference) for row, difference in pairs if difference]:
        yield differences(report, compared, styles)
    if report.sweep and any(row.measure for row in report.rows):
        yield sweep(report, styles)
        yield from optima(report, styles)


def differences(report: Report, compared: Compared, styles: Styles) -> Plot:
    """Each difference to the baseline and its interval, around a line at 0."""
    measure = report.measure
    name = f"Difference to {report.baseline} in {measure.name}"
    title = titled(name, measure.difference_unit)
    kinds = {bar(difference)[2] for _, difference in compared}
    below = [text for kind, text in BARS.items() if kind in kinds]
    if report.terms != ONE_NOMINAL:
        below += ["better →" if measure.higher_is_better else "← better"]
    text = "; ".join(f"{named(row)} {row.comparison.clause}" for row, _ in compared)
    draw = partial(draw_differences, report, compared, styles, title, ", ".join(below))
    note = TOO_FEW if "sd" in kinds else ""
    return Plot("differences", "answer", title, f"{title}. {text}.", note, draw)


def bar(difference: Difference) -> tuple[float, float, str]:
    """The extents of a bar below and above the mean, and its kind."""
    mean, low, high, deviation, *_ = difference
    if low is not None and high is not None:
        return mean - low, high - mean, "interval"
    return deviation or 0.0, deviation or 0.0, "" if deviation is None else "sd"


def draw_differences(
    report: Report,
    compared: Compared,
    styles: Styles,
    title: str,
    below: str,
) -> Figure:
    """Draws a panel a point of the sweep, a row an algorithm."""
    rows: dict[str, list[tuple[Row, Difference]]] = {}
    ends, factor = [0.0], report.measure.scale
    for row, difference in compared:
        rows.setdefault(row.point, []).append((row, difference))
        under, over, _ = bar(difference)
        ends += [difference.mean - under, difference.mean + over]
    most = max(map(len, rows.values()))
    # Beside algorithms that have the swept flag stand others without it.
    bare = f"without {report.sweep}" if any(rows) else ""
    heads = [formatting.point_text(point) or bare for point in rows]
    figure, axes = panels(title, heads, below, ROW * most)
    for each, own in zip(axes, rows.values(), strict=True):
        x = Range(min(ends) * factor, max(ends) * factor)
        scale(each, "x", x.widened(0.03), 6)
        each.set(ylim=(most, 0), yticks=[])
        for i, (row, difference) in enumerate(own):
            # Above its bar: beside it a label would leave a phone no room for the bar.
            first, *rest = wrapped(row.label, WIDTH - 24)
            text = f"{first} …" if rest else first
            each.text(0, i + 0.38, text, transform=each.get_yaxis_transform())
            draw_difference(each, i + 0.7, difference, factor, styles[row.label])
            tip = f"{row.label}: {row.comparison.clause}"
            charts.add_tips(each, [difference.mean * factor], [i + 0.7], [tip])
    return figure


def draw_difference(
    axes: Axes, y: float, difference: Difference, factor: float, style: dict
) -> None:
    """Draws a bar with a marker beside the line at 0."""
    # The line at 0 is in pieces, as one line would cross the labels.
    axes.plot([0, 0], [y - 0.23, y + 0.23], color=LIGHT["muted"], linewidth=1)
    under, over, kind = bar(difference)
    axes.errorbar(
        difference.mean * factor,
        y,
        xerr=[[under * factor], [over * factor]],
        elinewidth=2.5 if kind == "interval" else 1,
        markersize=8,
        **style,
    )


def sweep(report: Report, styles: Styles) -> Plot:
    """The measure at the end against the swept value."""
    measure = report.measure
    rows = [r for r in report.rows if r.measure and formatting.known(r.measure.mean)]
    name = titled(measure.name, measure.unit)
    title = f"{formatting.sentence(name)} by {report.sweep}"
    points = [p for p in dict.fromkeys(row.point for row in report.rows) if p]
    values, ticks = positions([point.partition("=")[2] for point in points])
    x = Range(min(values), max(values)).widened(0.1)
    at = dict(zip(points, values, strict=True))
    labels = [x for x in styles if any(row.label == x for row in rows)]
    lines = []
    for i, label in enumerate(labels):
        # Side by side: deviations at one value would cover each other.
        shift = 0.02 * (i - (len(labels) - 1) / 2) * (max(values) - min(values))
        own = [row for row in rows if row.label == label]
        lines += [swept(report, own, {p: v + shift for p, v in at.items()}, x)]
    low = min(float(line.low.min()) for line in lines)
    y = Range(low, max(float(line.high.max()) for line in lines)).widened(0.05)
    ends = [f"{named(r)} {spread(r.measure, measure)}" for r in rows]
    gone = [named(r) for r in report.rows if r not in rows]
    texts = charts.legend_texts(report)
    chart = Chart(title, report.sweep, x, y, lines, styles, texts, bars=True)
    return Plot(
        f"{measure.key} by {report.sweep}",
        "sweep",
        title,
        f"{title}, at the end: {', '.join(ends)}.",
        f"All runs diverged: {', '.join(gone)}." if gone else "",
        partial(draw_sweep, chart, values, ticks),
    )


def optima(report: Report, styles: Styles) -> Iterator[Plot]:
    """The best value of each tuned flag against the swept value."""
    points = [p for p in dict.fromkeys(row.point for row in report.rows) if p]
    values, ticks = positions([point.partition("=")[2] for point in points])
    x = Range(min(values), max(values)).widened(0.1)
    at = dict(zip(points, values, strict=True))
    for flag in dict.fromkeys(tuning.flag for tuning in report.tuning):
        found = [t for t in report.tuning if t.flag == flag and t.point in at]
        labels = [x for x in styles if any(t.label == x for t in found)]
        lines = [
            optimum([t for t in found if t.label == label], at) for label in labels
        ]
        if not lines:
            continue
        tried = [value for tuning in found for value in tuning.values]
        log = min(tried) > 0 and max(tried) >= 4 * min(tried)
        y = Range(min(tried), max(tried), log).widened(0.05)
        title = f"Best {flag} by {report.sweep}"
        known = any(tuning.low is not None for tuning in found)
        bars = "Bars: 95 % intervals, by resampling the seeds of the trials."
        texts = {label: label for label in labels}
        chart = Chart(title, report.sweep, x, y, lines, styles, texts, bars=True)
        ends = "; ".join(tip for line in lines for tip in line.tips)
        yield Plot(
            f"best {flag} by {report.sweep}",
            "sweep",
            title,
            f"{title}, chosen on validation data: {ends}.",
            bars if known else "",
            partial(draw_sweep, chart, values, ticks),
        )


def optimum(found: Sequence[Tuning], at: dict[str, float]) -> Line:
    """One algorithm's best values of a flag, and their intervals."""
    ends = [(t.chosen if t.low is None else t.low, t.high or t.chosen) for t in found]
    tips = [
        f"{named(t)}: {formatting.number(t.chosen)}"
        + ("" if t.low is None else f" [{', '.join(map(formatting.number, end))}]")
        + " (at the edge)" * t.at_edge
        for t, end in zip(found, ends, strict=True)
    ]
    low, high = np.array(ends, float).T
    x = np.array([at[t.point] for t in found])
    y = np.array([t.chosen for t in found], float)
    # A resample may leave the chosen value out.
    low, high = np.minimum(low, y), np.maximum(high, y)
    return Line(found[0].label, "", x, y, low, high, tips)


def swept(report: Report, rows: Sequence[Row], at: dict[str, float], x: Range) -> Line:
    """One algorithm's means and deviations; a line across, if it is not swept."""
    measure = report.measure
    spreads = [row.measure for row in rows if row.measure]
    y = np.array([s.mean * measure.scale for s in spreads])
    around = np.array([(s.deviation or 0.0) * measure.scale for s in spreads])
    tips = [f"{named(r)}: {spread(r.measure, measure)}" for r in rows]
    xs = np.array([at.get(row.point, x.high) for row in rows])
    if rows[0].point not in at:
        xs, y, around, tips = np.array([x.low, x.high]), y.repeat(2), 0.0, tips * 2
    return Line(rows[0].label, "", xs, y, y - around, y + around, tips)


def draw_sweep(chart: Chart, values: Sequence[float], ticks: Sequence[str]) -> Figure:
    """Draws a line an algorithm, with ticks at the swept values."""
    figure = charts.draw_chart(chart)
    figure.axes[0].set_xticks(values, ticks)
    return figure


def positions(texts: Sequence[str]) -> tuple[list[float], list[str]]:
    """Places of the swept values: even for words and for growth by factors."""
    try:
        values = [float(text) for text in texts]
    except ValueError:
        return list(range(len(texts))), [plain(text) for text in texts]
    ticks = [formatting.number(x) for x in values]
    # Workers, periods and rates are swept by factors.
    if min(values) > 0 and max(values) >= 4 * min(values):
        return [float(np.log(x)) for x in values], ticks
    return values, ticks
