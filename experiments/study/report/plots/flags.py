"""Figures over the values of a flag: a sweep, the best values in it, and trials."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments.study.analysis import formatting
from experiments.study.analysis.formatting import named, number, spread
from experiments.study.analysis.results import Report
from experiments.study.report import charts
from experiments.study.report.charts import Chart, Line, Plot, Range, titled
from experiments.study.report.styles import Styles
from experiments.study.statistics import Measure
from experiments.study.tuning import Tuning


class Sweep(NamedTuple):
    """The x axis of the swept values.

    Attributes:
        at: positions on the axis, by point.
        ticks: tick labels.
    """

    at: Mapping[str, float]
    ticks: Sequence[str]

    @property
    def range(self) -> Range:
        """The range from the smallest to the largest position."""
        return Range(min(self.at.values()), max(self.at.values()))


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """Yields the measure over the sweep, and the trials of each tuned flag."""
    swept = swept_values(report)
    if swept.at and any(row.measure for row in report.rows):
        yield sweep(report, styles, swept)
    else:
        swept = Sweep({}, [])
    for flag in dict.fromkeys(tuning.flag for tuning in report.tuning):
        tried = [tuning for tuning in report.tuning if tuning.flag == flag]
        if found := [tuning for tuning in tried if tuning.point in swept.at]:
            yield optima(report, styles, swept, flag, found)
        yield trials(report, styles, flag, tried)


def swept_values(report: Report) -> Sweep:
    """Returns the axis of the swept values, evenly spaced for words and for factors."""
    points = [p for p in dict.fromkeys(row.point for row in report.rows) if p]
    texts = [point.partition("=")[2] for point in points]
    try:
        places = [float(text) for text in texts]
    except ValueError:
        ticks = [charts.plain(text) for text in texts]
        return Sweep({point: i for i, point in enumerate(points)}, ticks)
    ticks = [number(x) for x in places]
    # Workers, periods and rates usually grow by factors: a logarithmic axis.
    if places and min(places) > 0 and max(places) >= 4 * min(places):
        places = [float(np.log(x)) for x in places]
    return Sweep(dict(zip(points, places, strict=True)), ticks)


def sweep(report: Report, styles: Styles, swept: Sweep) -> Plot:
    """Returns the figure of the final measure against the swept value."""
    measure, x = report.measure, swept.range
    rows = [row for row in report.rows if formatting.is_known(row)]
    title = f"{titled(measure.name, measure.unit)} by {report.sweep}"
    labels = [label for label in styles if any(row.label == label for row in rows)]
    ends, lines = x.widened(0.1), []
    for i, label in enumerate(labels):
        # Side by side: deviations at one value would cover each other.
        shift = 0.02 * (i - (len(labels) - 1) / 2) * (x.high - x.low)
        own = [row for row in rows if row.label == label]
        xs = [swept.at[row.point] + shift for row in own if row.point]
        is_swept = bool(xs)
        # An algorithm without the flag gets a horizontal line.
        own, xs = (own, xs) if is_swept else (own * 2, [ends.low, ends.high])
        tips = [f"{named(row)}: {spread(row.measure, measure)}" for row in own]
        line = charts.line_of_rows(report, own, xs, tips)
        lines.append(line if is_swept else line._replace(low=line.y, high=line.y))
    gone = [named(row) for row in report.rows if row not in rows]
    reached = [f"{named(row)} {spread(row.measure, measure)}" for row in rows]
    texts, y = charts.legend_texts(report), charts.extent(lines).widened(0.05)
    chart = Chart(title, report.sweep, ends, y, lines, styles, texts, bars=True)
    return Plot(
        f"{measure.key} by {report.sweep}",
        "sweep",
        title,
        f"{title}, at the end: {', '.join(reached)}.",
        f"All runs diverged: {', '.join(gone)}." if gone else "",
        partial(draw_sweep, chart, swept),
    )


def optima(
    report: Report, styles: Styles, swept: Sweep, flag: str, found: Sequence[Tuning]
) -> Plot:
    """Returns the figure of the best value of a tuned flag against the swept value."""
    labels = [label for label in styles if any(t.label == label for t in found)]
    lines = [optimum([t for t in found if t.label == x], swept.at) for x in labels]
    tried = [value for tuning in found for value in tuning.values]
    log = min(tried) > 0 and max(tried) >= 4 * min(tried)
    x, y = swept.range.widened(0.1), Range(min(tried), max(tried), log).widened(0.05)
    title, texts = f"Best {flag} by {report.sweep}", {label: label for label in labels}
    chart = Chart(title, report.sweep, x, y, lines, styles, texts, bars=True)
    known = any(tuning.low is not None for tuning in found)
    bars = "Bars: 95 % intervals, from resampling the seeds of the trials."
    return Plot(
        f"best {flag} by {report.sweep}",
        "sweep",
        title,
        f"{title}, chosen on validation data: "
        f"{'; '.join(tip for line in lines for tip in line.tips)}.",
        bars if known else "",
        partial(draw_sweep, chart, swept),
    )


def optimum(found: Sequence[Tuning], at: Mapping[str, float]) -> Line:
    """Returns an algorithm's best values of a flag, and their intervals."""
    ends = [(t.chosen if t.low is None else t.low, t.high or t.chosen) for t in found]
    tips = [
        f"{named(t)}: {number(t.chosen)}"
        + ("" if t.low is None else f" [{', '.join(map(number, end))}]")
        + " (at the edge)" * t.at_edge
        for t, end in zip(found, ends, strict=True)
    ]
    low, high = np.array(ends, float).T
    x = np.array([at[t.point] for t in found])
    y = np.array([t.chosen for t in found], float)
    # The interval of the resamples may leave out the chosen value.
    low, high = np.minimum(low, y), np.maximum(high, y)
    return Line(found[0].label, "", x, y, low, high, tips)


def draw_sweep(chart: Chart, swept: Sweep) -> Figure:
    """Draws a line per algorithm, with ticks at the swept values."""
    figure = charts.draw_chart(chart)
    figure.axes[0].set_xticks([*swept.at.values()], swept.ticks)
    return figure


def trials(report: Report, styles: Styles, flag: str, tried: Sequence[Tuning]) -> Plot:
    """Returns the figure of validation scores against the values that were tried."""
    measure = report.measure
    name = titled(measure.name.removeprefix("test "), measure.unit)
    title = f"{name} on validation data by {flag}"
    values = [x for tuning in tried for x in tuning.values]
    log = min(values) > 0 and ("lr" in flag or max(values) > 10 * min(values))
    chart = Chart(
        title,
        f"{flag}{' (log)' * log}; ring: chosen",
        Range(min(values), max(values), log).widened(0.03),
        score_range(tried, measure).widened(0.07),
        [scores_of(tuning, measure) for tuning in tried],
        styles,
        {tuning.label: tuning.label for tuning in tried},
    )
    chosen = "; ".join(f"{named(t)} {number(t.chosen)}" for t in tried)
    edges = [f"{named(t)} ({number(t.chosen)})" for t in tried if t.at_edge]
    notes = [f"Best at the edge of the range: {', '.join(edges)}."] if edges else []
    if any(score is None for t in tried for score in t.scores):
        notes += ["× at the bottom: a run diverged."]
    text, draw = f"{title}. Chosen: {chosen}.", partial(draw_trials, chart, tried)
    return Plot(f"tuning {flag}", "tuning", title, text, " ".join(notes), draw)


def score_range(tried: Sequence[Tuning], measure: Measure) -> Range:
    """Returns the range of the scores; a loss far above the median does not count."""
    found = (score for tuning in tried for score in tuning.scores)
    scores = [s * measure.scale for s in found if s is not None and formatting.known(s)]
    if not scores:
        return Range(0.0, 1.0)
    low, high = min(scores), max(scores)
    if 0 < low < high / 1000:
        return Range(low, high, log=True)
    # A loss has no upper bound: one poor value would flatten all others.
    if not measure.higher_is_better:
        high = min(high, low + 8 * max(float(np.median(scores)) - low, abs(low) / 2))
    return Range(low, high)


def scores_of(tuning: Tuning, measure: Measure) -> Line:
    """Returns the scores of an algorithm as a line; NaN for runs that diverged."""
    x, scores = np.array(tuning.values, float), np.array(tuning.scores, float)
    y = np.where(np.isfinite(scores), scores, np.nan) * measure.scale
    tips = [
        f"{tuning.label}: "
        f"{formatting.with_unit(formatting.shown(score, measure), measure)} at "
        f"{tuning.flag} {number(value)}"
        for value, score in zip(tuning.values, scores, strict=True)
    ]
    return Line(tuning.label, tuning.point, x, y, y, y, tips)


def draw_trials(chart: Chart, tried: Sequence[Tuning]) -> Figure:
    """Draws a line per algorithm, rings around the best, and crosses for divergence."""
    figure = charts.draw_chart(chart)
    points = list(dict.fromkeys(tuning.point for tuning in tried if tuning.point))
    for tuning, line in zip(tried, chart.lines, strict=True):
        axes = figure.axes[points.index(tuning.point) if tuning.point else 0]
        # Markers at the edge of the range lie on the frame and must not be cut off.
        free = {"color": chart.styles[tuning.label]["color"], "markeredgewidth": 1}
        free |= {"clip_on": False, "in_layout": False}
        gone, best = line.x[np.isnan(line.y)], line.x == tuning.chosen
        axes.plot(gone, np.full(len(gone), chart.y.low), "x", markersize=7, **free)
        ring = {"markersize": 12, "markerfacecolor": "none"}
        axes.plot(line.x[best], line.y[best], "o", **ring, **free)
    return figure
