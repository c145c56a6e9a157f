"""The figures of tuning: validation scores against the values that were tried."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from experiments.study.analysis import formatting
from experiments.study.analysis.formatting import named, number
from experiments.study.analysis.results import Measure, Report, Tuning
from experiments.study.report.axes import Plot, Range, titled
from experiments.study.report.charts import Chart, Line, draw_chart
from experiments.study.report.styles import Styles


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """A figure a tuned flag."""
    measure = report.measure
    name = titled(measure.name.removeprefix("test "), measure.unit)
    for flag in dict.fromkeys(tuning.flag for tuning in report.tuning):
        trials = [tuning for tuning in report.tuning if tuning.flag == flag]
        title = f"{formatting.sentence(name)} on validation data by {flag}"
        chosen = [f"{named(t)} {number(t.chosen)}" for t in trials]
        values = [x for tuning in trials for x in tuning.values]
        log = min(values) > 0 and ("lr" in flag or max(values) > 10 * min(values))
        chart = Chart(
            title,
            f"{flag}{' (log)' * log}; ring: chosen",
            Range(min(values), max(values), log).widened(0.03),
            score_range(trials, measure).widened(0.07),
            [line_of(tuning, measure) for tuning in trials],
            styles,
            {tuning.label: tuning.label for tuning in trials},
        )
        text = f"{title}. Chosen: {'; '.join(chosen)}."
        draw = partial(draw_trials, chart, trials)
        yield Plot(f"tuning {flag}", "tuning", title, text, note(trials), draw)


def note(trials: Sequence[Tuning]) -> str:
    """Names the algorithms whose best value is at an edge, and explains the crosses."""
    edges = [f"{named(t)} ({number(t.chosen)})" for t in trials if t.at_edge]
    notes = [f"Best at the edge of the range: {', '.join(edges)}."] if edges else []
    if any(score is None for t in trials for score in t.scores):
        notes += ["× at the bottom: a run diverged."]
    return " ".join(notes)


def score_range(trials: Sequence[Tuning], measure: Measure) -> Range:
    """The range of all scores, without losses far above the median."""
    found = (score for tuning in trials for score in tuning.scores)
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


def line_of(tuning: Tuning, measure: Measure) -> Line:
    """The scores of one algorithm; NaN for runs that diverged."""
    x, scores = np.array(tuning.values, float), np.array(tuning.scores, float)
    y = np.where(np.isfinite(scores), scores, np.nan) * measure.scale
    tips = [
        f"{tuning.label}: {formatting.shown(score, measure)} {measure.unit}".rstrip()
        + f" at {tuning.flag} {number(value)}"
        for value, score in zip(tuning.values, scores, strict=True)
    ]
    return Line(tuning.label, tuning.point, x, y, y, y, tips)


def draw_trials(chart: Chart, trials: Sequence[Tuning]) -> Figure:
    """Draws a line an algorithm, rings around the best and crosses for divergence."""
    figure = draw_chart(chart)
    points = list(dict.fromkeys(tuning.point for tuning in trials if tuning.point))
    for tuning, line in zip(trials, chart.lines, strict=True):
        axes = figure.axes[points.index(tuning.point) if tuning.point else 0]
        color = chart.styles[tuning.label]["color"]
        # At the edge of the range they lie on the frame, where they must not be cut.
        free = {"color": color, "clip_on": False, "in_layout": False}
        free["markeredgewidth"] = 1
        gone, best = line.x[np.isnan(line.y)], line.x == tuning.chosen
        axes.plot(gone, np.full(len(gone), chart.y.low), "x", markersize=7, **free)
        ring = {"markersize": 12, "markerfacecolor": "none"}
        axes.plot(line.x[best], line.y[best], "o", **ring, **free)
    return figure
