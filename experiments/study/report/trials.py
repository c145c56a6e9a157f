"""The figures of tuning: validation scores against the values that were tried."""

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
    shown,
    with_unit,
)
from experiments.study.analysis.results import Measure, Report, Tuning
from experiments.study.report.axes import (
    NARROW,
    End,
    Plot,
    add_tips,
    label_ends,
    panels,
    scale,
    titled,
)
from experiments.study.report.styles import Styles


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """A figure a tuned flag."""
    measure = report.measure
    name = titled(measure.name.removeprefix("test "), measure.unit)
    for flag in dict.fromkeys(tuning.flag for tuning in report.tuning):
        trials = [tuning for tuning in report.tuning if tuning.flag == flag]
        title = f"{sentence(name)} on validation data by {flag}"
        chosen = [f"{named(t.label, t.point)} {number(t.chosen)}" for t in trials]
        yield Plot(
            f"tuning {flag}",
            "tuning",
            title,
            f"{title}. Chosen: {'; '.join(chosen)}.",
            note(trials),
            partial(draw, report, flag, trials, styles, title),
            large=True,
        )


def note(trials: Sequence[Tuning]) -> str:
    """Names the algorithms whose best value is at an edge, and explains the crosses."""
    edges = [
        f"{named(t.label, t.point)} ({number(t.chosen)})" for t in trials if t.at_edge
    ]
    notes = [f"Best at the edge of the range: {', '.join(edges)}."] if edges else []
    if any(score is None for t in trials for score in t.scores):
        notes += ["× at the bottom: a run diverged."]
    return " ".join(notes)


def draw(
    report: Report,
    flag: str,
    trials: Sequence[Tuning],
    styles: Styles,
    title: str,
    width: float,
) -> Figure:
    """Draws a line an algorithm, a panel a point of the sweep."""
    points = list(dict.fromkeys(tuning.point for tuning in trials))
    labels = list(dict.fromkeys(tuning.label for tuning in trials))
    values = [x for tuning in trials for x in tuning.values]
    log = min(values) > 0 and ("lr" in flag or max(values) > 10 * min(values))
    below = f"{flag}{' (log)' * log}; ring: chosen"
    figure, axes = panels(title, points, report.sweep, below, width, labels)
    low, high = score_limits(trials, report.measure)
    most = 3 if width == NARROW else 8
    ends: dict[Axes, list[End]] = {}
    for each, point in zip(axes, points, strict=True):
        scale(each.xaxis, "plain", min(values), max(values), log, 0.03, most)
        scale(each.yaxis, "plain", low, high, room=0.07)
        own = [
            draw_line(each, tuning, styles, report.measure)
            for tuning in trials
            if tuning.point == point
        ]
        ends[each] = [end for end in own if end]
    label_ends(figure, ends)
    return figure


def score_limits(trials: Sequence[Tuning], measure: Measure) -> tuple[float, float]:
    """The range of all scores, without losses far above the median."""
    found = (score for tuning in trials for score in tuning.scores)
    scores = [s * measure.scale for s in found if s is not None and known(s)]
    if not scores:
        return 0.0, 1.0
    low, high = min(scores), max(scores)
    if not measure.higher_is_better:  # a loss has no upper bound
        high = min(high, low + 8 * max(float(np.median(scores)) - low, abs(low) / 2))
    return low, high


def draw_line(
    axes: Axes, tuning: Tuning, styles: Styles, measure: Measure
) -> End | None:
    """Draws scores, crosses for divergence and a ring around the best; returns the end.

    The end is None where all runs diverged.
    """
    style = styles[tuning.label]
    bottom, top = axes.get_ylim()
    values = np.array(tuning.values, float)
    scores = np.array([np.nan if s is None else s for s in tuning.scores], float)
    fine, ys = np.isfinite(scores), scores * measure.scale
    axes.plot(values, ys, **style)
    # At the edge of the range they lie on the frame: they are neither cut nor in the
    # way of the layout.
    free = {"color": style["color"], "clip_on": False, "in_layout": False}
    gone, best = values[~fine], values == tuning.chosen
    axes.plot(gone, np.full(len(gone), bottom), "x", markeredgewidth=1, **free)
    ring = {"markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1}
    axes.plot(values[best], ys[best], "o", **ring, **free)
    texts = [
        f"{tuning.label}: {with_unit(shown(score, measure), measure)} at {tuning.flag} "
        f"{number(value)}"
        for value, score in zip(tuning.values, scores, strict=True)
        if known(score)
    ]
    if not texts:
        return None
    xs, seen = values[fine], np.clip(ys[fine], bottom, top)
    add_tips(axes, list(xs), list(seen), texts)
    return xs[-1], seen[-1], tuning.label, style
