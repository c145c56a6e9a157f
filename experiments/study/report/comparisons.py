"""The figures of the ends of runs: differences to the baseline, and a sweep."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.study.analysis.formatting import (
    known,
    named,
    number,
    sentence,
    spread,
)
from experiments.study.analysis.results import ONE_NOMINAL, Measure, Report, Row
from experiments.study.report.axes import (
    End,
    Plot,
    add_tips,
    label_ends,
    panels,
    plain,
    scale,
    titled,
    with_lost,
    wrapped,
)
from experiments.study.report.styles import LIGHT, Styles
from experiments.study.statistics import Difference

ROW = 40  # height of an algorithm in the figure of differences, units
BARS = {"interval": "thick: 95 % interval", "sd": "thin: one deviation to each side"}


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """The differences to the baseline, and the measure over a sweep."""
    if rows := [row for row in report.rows if row.difference]:
        yield differences(report, rows, styles)
    if report.sweep and any(row.measure for row in report.rows):
        yield sweep(report, styles)


def differences(report: Report, rows: Sequence[Row], styles: Styles) -> Plot:
    """Each difference to the baseline and its interval, around a line at 0."""
    measure = report.measure
    name = f"Difference to {report.baseline} in {measure.name}"
    title = titled(name, measure.difference_unit)
    kinds = {bar(row.difference)[2] for row in rows if row.difference}
    below = [text for kind, text in BARS.items() if kind in kinds]
    if report.terms != ONE_NOMINAL:
        below += ["better →" if measure.higher_is_better else "← better"]
    verdicts = "; ".join(f"{named(row.label, row.point)} {row.verdict}" for row in rows)
    note = (
        "Thin bars are one standard deviation of the differences to each side: there "
        "are too few seeds for an interval."
    )
    return Plot(
        "differences",
        "answer",
        title,
        f"{title}. {verdicts}.",
        note if "sd" in kinds else "",
        partial(draw_differences, report, rows, styles, title, ", ".join(below)),
    )


def bar(difference: Difference) -> tuple[float, float, str]:
    """The ends of the bar around a mean, and its kind."""
    mean, low, high, deviation, *_ = difference
    if low is not None and high is not None:
        return low, high, "interval"
    if deviation is not None:
        return mean - deviation, mean + deviation, "sd"
    return mean, mean, ""


def draw_differences(
    report: Report,
    rows: Sequence[Row],
    styles: Styles,
    title: str,
    below: str,
    width: float,
) -> Figure:
    """Draws a panel a point, a row an algorithm."""
    factor = report.measure.scale
    points = list(dict.fromkeys(row.point for row in rows))
    most = max(sum(row.point == point for row in rows) for point in points)
    figure, axes = panels(title, points, report.sweep, below, width, (), ROW * most)
    bars = [bar(row.difference) for row in rows if row.difference]
    ends = [0.0, *(x * factor for low, high, _ in bars for x in (low, high))]
    for each, point in zip(axes, points, strict=True):
        scale(each.xaxis, "plain", min(ends), max(ends), room=0.03, most=6)
        each.set(ylim=(most, 0), yticks=[])
        own = [row for row in rows if row.point == point]
        for i, row in enumerate(own):
            draw_difference(each, i, row, styles, factor, width)
    return figure


def draw_difference(
    axes: Axes, top: int, row: Row, styles: Styles, factor: float, width: float
) -> None:
    """Draws a label and, below it, a bar with a marker beside the line at 0."""
    if row.difference is None:
        return
    first, *rest = wrapped(row.label, width - 24)
    text = f"{first} …" if rest else first
    axes.text(0, top + 0.38, text, transform=axes.get_yaxis_transform())
    # The line at 0 is cut into pieces, as it would cross labels.
    y, mean = top + 0.7, row.difference.mean
    axes.plot([0, 0], [y - 0.23, y + 0.23], color=LIGHT["muted"], linewidth=1)
    low, high, kind = bar(row.difference)
    axes.errorbar(
        mean * factor,
        y,
        xerr=[[(mean - low) * factor], [(high - mean) * factor]],
        elinewidth=2.5 if kind == "interval" else 1,
        markersize=8,
        **styles[row.label],
    )
    add_tips(axes, [mean * factor], [y], [f"{row.label}: {row.verdict}"])


def sweep(report: Report, styles: Styles) -> Plot:
    """The measure at the end against the swept value."""
    measure = report.measure
    rows = [row for row in report.rows if row.measure and known(row.measure.mean)]
    title = f"{sentence(titled(measure.name, measure.unit))} by {report.sweep}"
    ends = [f"{named(r.label, r.point)} {spread(r.measure, measure)}" for r in rows]
    gone = [named(row.label, row.point) for row in report.rows if row not in rows]
    return Plot(
        f"{measure.key} by {report.sweep}",
        "sweep",
        title,
        f"{title}, at the end: {', '.join(ends)}.",
        f"All runs diverged: {', '.join(gone)}." if gone else "",
        partial(draw_sweep, report, rows, styles, title),
        large=True,
    )


def draw_sweep(
    report: Report, rows: Sequence[Row], styles: Styles, title: str, width: float
) -> Figure:
    """Draws a line an algorithm; across, if it lacks the swept flag."""
    measure = report.measure
    points = [p for p in dict.fromkeys(row.point for row in report.rows) if p]
    values, ticks = positions([point.partition("=")[2] for point in points])
    labels = {
        label: with_lost(report, label)
        for label in styles
        if any(row.label == label for row in rows)
    }
    figure, (axes,) = panels(
        title, [""], "", report.sweep, width, list(labels.values())
    )
    spreads = [row.measure for row in rows if row.measure]
    lows = [(s.mean - (s.deviation or 0)) * measure.scale for s in spreads]
    highs = [(s.mean + (s.deviation or 0)) * measure.scale for s in spreads]
    scale(axes.xaxis, "plain", min(values), max(values), room=0.1)
    axes.set_xticks(values, ticks)
    scale(axes.yaxis, "plain", min(lows), max(highs), room=0.05)
    ends: list[End] = []
    for i, (label, text) in enumerate(labels.items()):
        # Side by side: deviations of one value would cover each other.
        shift = 0.02 * (i - (len(labels) - 1) / 2) * (max(values) - min(values))
        at = {p: x + shift for p, x in zip(points, values, strict=True)}
        own = [row for row in rows if row.label == label]
        x, y = draw_swept(axes, own, styles, at, measure)
        ends.append((x, y, text, styles[label]))
    label_ends(figure, {axes: ends})
    return figure


def draw_swept(
    axes: Axes,
    rows: Sequence[Row],
    styles: Styles,
    at: dict[str, float],
    measure: Measure,
) -> tuple[float, float]:
    """Draws one algorithm's means and deviations; returns the end of its line."""
    right, style = axes.get_xlim()[1], styles[rows[0].label]
    xs = [at.get(row.point, right) for row in rows]
    spreads = [row.measure for row in rows if row.measure]
    ys = [s.mean * measure.scale for s in spreads]
    deviations = [(s.deviation or 0.0) * measure.scale for s in spreads]
    if rows[0].point in at:
        axes.errorbar(xs, ys, deviations, elinewidth=1.2, **style)
    else:
        axes.axhline(ys[0], color=style["color"], linestyle=style["linestyle"])
    texts = [f"{named(r.label, r.point)}: {spread(r.measure, measure)}" for r in rows]
    add_tips(axes, xs, ys, texts)
    return xs[-1], ys[-1]


def positions(texts: Sequence[str]) -> tuple[list[float], list[str]]:
    """Places of the swept values: even for words and for growth by factors."""
    try:
        values = [float(text) for text in texts]
    except ValueError:
        return list(range(len(texts))), [plain(text) for text in texts]
    if min(values) > 0 and max(values) >= 4 * min(values):
        return [float(np.log(x)) for x in values], [number(x) for x in values]
    return values, [number(x) for x in values]
