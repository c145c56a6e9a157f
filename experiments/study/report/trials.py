"""The figures of what was tuned."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from experiments.study.analysis.formatting import (
    known,
    named,
    number,
    sentence,
    shown,
    with_unit,
)
from experiments.study.analysis.results import Measure, Report, Tuning
from experiments.study.report.canvas import (
    NARROW,
    Drawing,
    Plan,
    Point,
    canvas,
    place,
    set_x,
    set_y,
)
from experiments.study.report.comparisons import panel_text, titled
from experiments.study.report.line_labels import End, column, draw_names, tall
from experiments.study.report.styles import Look


def plans(report: Report, look: dict[str, Look]) -> Iterator[Plan]:
    """A figure for each flag that was tuned."""
    for flag in dict.fromkeys(tuning.flag for tuning in report.tuning):
        draw = partial(tuned, report, flag, look)
        yield Plan(f"tuning {flag}", draw, large=True)


def tuned(report: Report, flag: str, look: dict[str, Look], width: float) -> Drawing:
    """Draws the scores on validation data against the values that were tried."""
    measure = report.measure
    tunings = [tuning for tuning in report.tuning if tuning.flag == flag]
    points = list(dict.fromkeys(tuning.point for tuning in tunings))
    labels = [x for x in look if any(t.label == x for t in tunings)]
    name = measure.name.removeprefix("test ")
    title = f"{sentence(titled(name, measure))} on validation data by {flag}"
    above = [panel_text(point, points, report.sweep) for point in points]
    values = [x for tuning in tunings for x in tuning.values]
    log = min(values) > 0 and ("lr" in flag or max(values) > 10 * min(values))
    below = f"{flag}{' (log)' * log}; ring: chosen"
    least = {1: 180 if width == NARROW else 360}.get(len(points), 130)
    height, right = max(least, tall(labels, width)), column(labels, width)
    figure, panels = canvas(title, above, height, below, width, right=right)
    places: list[Point] = []
    low, high = score_limits(tunings, measure)
    for axes, point in zip(panels, points, strict=True):
        set_x(axes, "plain", min(values), max(values), log)
        set_y(axes, low, high, log=False)
        ends = []
        for tuning in (t for t in tunings if t.point == point):
            draw_tuning(axes, tuning, look[tuning.label], measure, low)
            if own := points_of(axes, tuning, measure):
                places += own
                ends.append(End(*own[-1][:2], tuning.label, look[tuning.label]))
        draw_names(axes, ends)
    told = "; ".join(f"{named(t.label, t.point)} {number(t.chosen)}" for t in tunings)
    text = f"{title}. Chosen: {told}."
    return Drawing(figure, title, text, tuning_note(tunings), "tuning", places)


def points_of(axes: Axes, tuning: Tuning, measure: Measure) -> list[Point]:
    """The scores at the values that were tried and did not diverge."""
    low, high = axes.get_ylim()
    found = []
    for value, score in zip(tuning.values, tuning.scores, strict=True):
        if score is not None and known(score):
            y = min(max(score * measure.scale, low), high)
            said = with_unit(shown(score, measure), measure)
            text = f"{tuning.label}: {said} at {tuning.flag} {number(value)}"
            found.append(Point(*place(axes, value, y), text))
    return found


def score_limits(tunings: Sequence[Tuning], measure: Measure) -> tuple[float, float]:
    """Ends of the axis: around all scores, but for losses far above the median."""
    found = (s for t in tunings for s in t.scores)
    scores = [s * measure.scale for s in found if s is not None and known(s)]
    if not scores:
        return 0.0, 1.0
    low, high = min(scores), max(scores)
    if not measure.higher_is_better:  # a loss knows no upper end
        high = min(high, low + 8 * max(float(np.median(scores)) - low, abs(low) / 2))
    margin = 0.07 * (high - low) or 0.5
    return low - margin, high + margin


def draw_tuning(
    axes: Axes, tuning: Tuning, look: Look, measure: Measure, low: float
) -> None:
    """Draws one algorithm's scores, a ring around the best, crosses for divergence."""
    scores = [np.nan if s is None else s * measure.scale for s in tuning.scores]
    axes.plot(
        tuning.values,
        scores,
        color=look.colour,
        linestyle=look.linestyle,
        marker=look.marker,
        markeredgewidth=0,
    )
    gone = [x for x, s in zip(tuning.values, scores, strict=True) if not known(s)]
    cross = {"linestyle": "", "marker": "x", "clip_on": False, "zorder": 5}
    axes.plot(gone, [low] * len(gone), color=look.colour, markersize=7, **cross)
    best = [s for x, s in zip(tuning.values, scores, strict=True) if x == tuning.chosen]
    ring = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "linestyle": ""}
    axes.plot(
        [tuning.chosen] * len(best), best, color=look.colour, clip_on=False, **ring
    )


def tuning_note(tunings: Sequence[Tuning]) -> str:
    """Names the algorithms whose best value is at an edge, and explains the crosses."""
    edges = [
        f"{named(t.label, t.point)} ({number(t.chosen)})" for t in tunings if t.at_edge
    ]
    notes = []
    if edges:
        notes.append(f"Best at the edge of the range: {', '.join(edges)}.")
    if any(s is None for t in tunings for s in t.scores):
        notes.append("× at the bottom: a run diverged.")
    return " ".join(notes)
