"""The figures that compare ends of runs: differences, sweeps and tuning."""

from collections.abc import Collection, Sequence

import numpy as np
from matplotlib.axes import Axes

from experiments.study.amounts import known, named, number, point_text, sentence, spread
from experiments.study.canvas import (
    CHARACTER,
    INK,
    MUTED,
    WIDTH,
    Drawing,
    Look,
    canvas,
    plain,
    set_x,
    set_y,
    wrapped,
)
from experiments.study.results import Measure, Report, Row, Tuning
from experiments.study.statistics import Difference

Named = list[tuple[str, Drawing]]
ROW = 40  # of an algorithm in the figure of differences, units


def answers(report: Report, look: dict[str, Look]) -> Named:
    """The differences to the baseline, and the measure over a sweep."""
    drawn: Named = []
    if any(row.difference for row in report.rows):
        drawn.append(("differences", differences(report, look)))
    if report.sweep and any(row.measure for row in report.rows):
        drawn.append((f"{report.measure.key} by {report.sweep}", swept(report, look)))
    return drawn


def differences(report: Report, look: dict[str, Look]) -> Drawing:
    """Draws each difference to the baseline and its interval, around a line at 0."""
    measure = report.measure
    rows = [row for row in report.rows if row.difference]
    points = list(dict.fromkeys(row.point for row in rows))
    most = max(sum(row.point == point for row in rows) for point in points)
    unit = f" ({measure.difference_unit})" if measure.difference_unit else ""
    title = f"Difference to {report.baseline} in {measure.name}{unit}"
    bars = [bar_of(row.difference) for row in rows if row.difference]
    thin = any(kind == "deviation" for _, _, kind in bars)
    thick = any(kind == "interval" for _, _, kind in bars)
    told = "thick: interval, " * thick + "thin: one deviation to each side, " * thin
    below = told + ("better →" if measure.higher_is_better else "← better")
    above = [panel_text(point, points, report.sweep) for point in points]
    figure, panels = canvas(title, {}, above, ROW * most, below, left=12)
    ends = [0.0, *(x * measure.scale for low, high, _ in bars for x in (low, high))]
    for axes, point in zip(panels, points, strict=True):
        set_x(axes, "plain", min(ends), max(ends), log=False)
        axes.set_ylim(ROW * most, 0)
        axes.set_yticks([])
        axes.axvline(0, color=MUTED, linewidth=1)
        here = [row for row in rows if row.point == point]
        for i, row in enumerate(here):
            draw_difference(axes, row, look[row.label], ROW * i, measure)
    verdicts = "; ".join(f"{named(row.label, row.point)} {row.verdict}" for row in rows)
    note = ""
    if thin:
        note = "Thin bars are one standard deviation of the differences to each side: "
        note += "there are too few seeds for an interval."
    return Drawing(figure, title, f"{title}. {verdicts}.", note, "answer")


def bar_of(difference: Difference) -> tuple[float, float, str]:
    """Ends of what is drawn around a mean, and what it is."""
    mean, low, high, deviation, *_ = difference
    if low is not None and high is not None:
        return low, high, "interval"
    if deviation is not None:
        return mean - deviation, mean + deviation, "deviation"
    return mean, mean, ""


def panel_text(point: str, points: Sequence[str], sweep: str) -> str:
    """What stands above a panel: the swept value, if there is one."""
    if not point and any(points):
        return f"without {sweep}"  # beside algorithms that have the flag
    return point_text(point)


def keys_of(
    report: Report, look: dict[str, Look], labels: Collection[str]
) -> dict[str, Look]:
    """The legend: these labels, and how many of their runs diverged."""
    keys = {}
    for label, style in look.items():
        rows = [row for row in report.rows if row.label == label]
        diverged, runs = sum(r.diverged for r in rows), sum(r.seeds for r in rows)
        more = f" ({diverged} of {runs} diverged)" if diverged else ""
        if label in labels:
            keys[label + more] = style
    return keys


def draw_difference(
    axes: Axes, row: Row, look: Look, top: float, measure: Measure
) -> None:
    """Draws a label and, below it, a bar with a marker."""
    difference = row.difference
    assert difference is not None
    label = wrapped(row.label, WIDTH - 24, CHARACTER)[0]
    axes.annotate(
        label,
        (0, top + 15),
        xycoords=("axes fraction", "data"),
        color=INK,
        fontsize=11,
    )
    y = top + 28
    low, high, kind = bar_of(difference)
    axes.plot(
        [low * measure.scale, high * measure.scale],
        [y, y],
        color=look.colour,
        solid_capstyle="butt",
        linewidth=2.5 if kind == "interval" else 1,
    )
    axes.plot(
        [difference.mean * measure.scale],
        [y],
        color=look.colour,
        marker=look.marker,
        markersize=8,
        markeredgewidth=0,
    )


def swept(report: Report, look: dict[str, Look]) -> Drawing:
    """Draws the measure at the end against the swept value."""
    measure = report.measure
    points = [p for p in dict.fromkeys(row.point for row in report.rows) if p]
    values, ticks = positions([point.partition("=")[2] for point in points])
    at = dict(zip(points, values, strict=True))
    rows = [row for row in report.rows if row.measure and known(row.measure.mean)]
    labels = {row.label for row in rows}
    title = sentence(titled(measure.name, measure)) + f" by {report.sweep}"
    keys = keys_of(report, look, labels)
    figure, (axes,) = canvas(title, keys, [""], 200, report.sweep)
    width = 0.02 * (max(values) - min(values))
    for i, label in enumerate(x for x in look if x in labels):
        own = [row for row in rows if row.label == label]
        shift = (i - (len(labels) - 1) / 2) * width
        draw_swept(axes, own, look[label], at, shift, measure)
    spreads = [row.measure for row in rows if row.measure]
    low = min(s.mean - (s.deviation or 0) for s in spreads) * measure.scale
    high = max(s.mean + (s.deviation or 0) for s in spreads) * measure.scale
    margin = 0.05 * (high - low) or 0.5
    set_x(axes, "plain", min(values), max(values), log=False, room=0.1)
    axes.set_xticks(values, ticks)
    set_y(axes, low - margin, high + margin, log=False)
    ends = [f"{named(r.label, r.point)} {spread(r.measure, measure)}" for r in rows]
    text = f"{title}, at the end: {', '.join(ends)}."
    gone = [named(row.label, row.point) for row in report.rows if row not in rows]
    note = f"All runs diverged: {', '.join(gone)}." if gone else ""
    return Drawing(figure, title, text, note, "answer")


def draw_swept(
    axes: Axes,
    rows: Sequence[Row],
    look: Look,
    at: dict[str, float],
    shift: float,
    measure: Measure,
) -> None:
    """Draws one algorithm's means and deviations; across, if it is not swept."""
    points = [(at.get(row.point), row.measure) for row in rows if row.measure]
    across = [s.mean * measure.scale for x, s in points if x is None]
    for y in across:
        axes.axhline(y, color=look.colour, linestyle=look.dash)
    placed = [(x + shift, s) for x, s in points if x is not None]
    axes.errorbar(
        [x for x, _ in placed],
        [s.mean * measure.scale for _, s in placed],
        [(s.deviation or 0.0) * measure.scale for _, s in placed],
        color=look.colour,
        linestyle=look.dash,
        marker=look.marker,
        markeredgewidth=0,
        elinewidth=1.2,
    )


def positions(texts: Sequence[str]) -> tuple[list[float], list[str]]:
    """Where the swept values lie: evenly if they grow by factors or are words."""
    try:
        values = [float(text) for text in texts]
    except ValueError:
        return list(range(len(texts))), [plain(text) for text in texts]
    if min(values) > 0 and max(values) >= 4 * min(values):
        return [float(np.log(x)) for x in values], [number(x) for x in values]
    return values, [number(x) for x in values]


def tunings(report: Report, look: dict[str, Look]) -> Named:
    """A figure for each flag that was tuned."""
    flags = list(dict.fromkeys(tuning.flag for tuning in report.tuning))
    return [(f"tuning {flag}", tuned(report, flag, look)) for flag in flags]


def tuned(report: Report, flag: str, look: dict[str, Look]) -> Drawing:
    """Draws the scores on validation data against the values that were tried."""
    measure = report.measure
    tunings = [tuning for tuning in report.tuning if tuning.flag == flag]
    points = list(dict.fromkeys(tuning.point for tuning in tunings))
    keys = {x: y for x, y in look.items() if any(t.label == x for t in tunings)}
    name = measure.name.removeprefix("test ")
    title = f"{sentence(titled(name, measure))} on validation data by {flag}"
    above = [panel_text(point, points, report.sweep) for point in points]
    values = [x for tuning in tunings for x in tuning.values]
    log = min(values) > 0 and ("lr" in flag or max(values) > 10 * min(values))
    below = f"{flag}{' (log)' * log}; ring: chosen"
    height = 180 if len(points) == 1 else 130
    figure, panels = canvas(title, keys, above, height, below)
    low, high = score_limits(tunings, measure)
    for axes, point in zip(panels, points, strict=True):
        set_x(axes, "plain", min(values), max(values), log)
        set_y(axes, low, high, log=False)
        for tuning in (t for t in tunings if t.point == point):
            draw_tuning(axes, tuning, look[tuning.label], measure, low)
    told = "; ".join(f"{named(t.label, t.point)} {number(t.chosen)}" for t in tunings)
    return Drawing(
        figure, title, f"{title}. Chosen: {told}.", tuning_note(tunings), "tuning"
    )


def titled(name: str, measure: Measure) -> str:
    """A name and its unit."""
    return f"{name} ({measure.unit})" if measure.unit else name


def score_limits(tunings: Sequence[Tuning], measure: Measure) -> tuple[float, float]:
    """Ends of the axis: from the best to well beyond the worst that was chosen."""
    scores = [s * measure.scale for t in tunings for s in t.scores if s and known(s)]
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
        linestyle=look.dash,
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
    """Who was best at an edge, and what a cross is."""
    edges = [
        f"{named(t.label, t.point)} ({number(t.chosen)})" for t in tunings if t.at_edge
    ]
    notes = []
    if edges:
        notes.append(f"Best at the edge of the range: {', '.join(edges)}.")
    if any(s is None for t in tunings for s in t.scores):
        notes.append("× at the bottom: a run diverged.")
    return " ".join(notes)
