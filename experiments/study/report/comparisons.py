"""The figures that compare ends of runs: differences and sweeps."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from experiments.study.analysis.formatting import (
    known,
    lost,
    named,
    number,
    point_text,
    sentence,
    spread,
)
from experiments.study.analysis.results import ONE_NOMINAL, Measure, Report, Row
from experiments.study.report.canvas import (
    INK,
    MUTED,
    NARROW,
    Drawing,
    Plan,
    Point,
    canvas,
    in_one_line,
    place,
    plain,
    set_x,
    set_y,
)
from experiments.study.report.line_labels import End, column, draw_names, tall
from experiments.study.report.styles import Look
from experiments.study.statistics import Difference

ROW = 40  # of an algorithm in the figure of differences, units


def plans(report: Report, look: dict[str, Look]) -> Iterator[Plan]:
    """The differences to the baseline, and the measure over a sweep."""
    if any(row.difference for row in report.rows):
        yield Plan("differences", partial(differences, report, look))
    if report.sweep and any(row.measure for row in report.rows):
        name = f"{report.measure.key} by {report.sweep}"
        yield Plan(name, partial(swept, report, look), large=True)


def differences(report: Report, look: dict[str, Look], width: float) -> Drawing:
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
    told = ["thick: 95 % interval"] * thick + [
        "thin: one deviation to each side"
    ] * thin
    if report.terms != ONE_NOMINAL:
        told += ["better →" if measure.higher_is_better else "← better"]
    above = [panel_text(point, points, report.sweep) for point in points]
    below = ", ".join(told)
    figure, panels = canvas(title, above, ROW * most, below, width, left=12)
    places: list[Point] = []
    ends = [0.0, *(x * measure.scale for low, high, _ in bars for x in (low, high))]
    for axes, point in zip(panels, points, strict=True):
        set_x(axes, "plain", min(ends), max(ends), log=False)
        axes.set_ylim(ROW * most, 0)
        axes.set_yticks([])
        here = [row for row in rows if row.point == point]
        for i, row in enumerate(here):
            draw_difference(axes, row, look[row.label], ROW * i, measure, width)
            x, y = middle_of(row, ROW * i, measure)
            places.append(Point(*place(axes, x, y), f"{row.label}: {row.verdict}"))
    verdicts = "; ".join(f"{named(row.label, row.point)} {row.verdict}" for row in rows)
    note = ""
    if thin:
        note = "Thin bars are one standard deviation of the differences to each side: "
        note += "there are too few seeds for an interval."
    return Drawing(figure, title, f"{title}. {verdicts}.", note, "answer", places)


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


def names_of(report: Report, labels: Sequence[str]) -> dict[str, str]:
    """The names of these algorithms, with the number of runs that diverged."""
    gone = {label: lost(report, label) for label in labels}
    return {label: f"{label} ({x})" if x else label for label, x in gone.items()}


def middle_of(row: Row, top: float, measure: Measure) -> tuple[float, float]:
    """The place of the mean difference of a row, whose upper end is at top."""
    assert row.difference is not None
    return row.difference.mean * measure.scale, top + 28


def draw_difference(
    axes: Axes, row: Row, look: Look, top: float, measure: Measure, width: float
) -> None:
    """Draws a name and, below it, a bar with a marker, and beside the bar the zero."""
    difference = row.difference
    assert difference is not None
    axes.annotate(
        in_one_line(row.label, width - 24),
        (0, top + 15),
        xycoords=("axes fraction", "data"),
        color=INK,
        fontsize=11,
    )
    x, y = middle_of(row, top, measure)
    axes.plot([0, 0], [y - 9, y + 9], color=MUTED, linewidth=1, zorder=1)
    low, high, kind = bar_of(difference)
    axes.plot(
        [low * measure.scale, high * measure.scale],
        [y, y],
        color=look.colour,
        solid_capstyle="butt",
        linewidth=2.5 if kind == "interval" else 1,
    )
    axes.plot(
        [x],
        [y],
        color=look.colour,
        marker=look.marker,
        markersize=8,
        markeredgewidth=0,
    )


def swept(report: Report, look: dict[str, Look], width: float) -> Drawing:
    """Draws the measure at the end against the swept value."""
    measure = report.measure
    points = [p for p in dict.fromkeys(row.point for row in report.rows) if p]
    values, ticks = positions([point.partition("=")[2] for point in points])
    at = dict(zip(points, values, strict=True))
    rows = [row for row in report.rows if row.measure and known(row.measure.mean)]
    title = sentence(titled(measure.name, measure)) + f" by {report.sweep}"
    names = names_of(report, [x for x in look if any(r.label == x for r in rows)])
    height = max(200 if width == NARROW else 360, tall(list(names.values()), width))
    right = column(list(names.values()), width)
    figure, (axes,) = canvas(title, [""], height, report.sweep, width, right=right)
    spreads = [row.measure for row in rows if row.measure]
    low = min(s.mean - (s.deviation or 0) for s in spreads) * measure.scale
    high = max(s.mean + (s.deviation or 0) for s in spreads) * measure.scale
    margin = 0.05 * (high - low) or 0.5
    set_x(axes, "plain", min(values), max(values), log=False, room=0.1)
    axes.set_xticks(values, ticks)
    set_y(axes, low - margin, high + margin, log=False)
    told: list[Point] = []
    ends = []
    for i, (label, name) in enumerate(names.items()):
        own = [row for row in rows if row.label == label]
        shift = 0.02 * (i - (len(names) - 1) / 2) * (max(values) - min(values))
        draw_swept(axes, own, look[label], at, shift, measure)
        told += points_of(axes, own, at, shift, measure)
        ends.append(End(told[-1].x, told[-1].y, name, look[label]))
    draw_names(axes, ends)
    said = [f"{named(r.label, r.point)} {spread(r.measure, measure)}" for r in rows]
    text = f"{title}, at the end: {', '.join(said)}."
    gone = [named(row.label, row.point) for row in report.rows if row not in rows]
    note = f"All runs diverged: {', '.join(gone)}." if gone else ""
    return Drawing(figure, title, text, note, "sweep", told, subject=title)


def points_of(
    axes: Axes,
    rows: Sequence[Row],
    at: dict[str, float],
    shift: float,
    measure: Measure,
) -> list[Point]:
    """The figures at the swept values; of what is not swept, at the right end."""
    right = axes.get_xlim()[1]
    found = []
    for row in rows:
        assert row.measure is not None
        x = at[row.point] + shift if row.point in at else right
        where = place(axes, x, row.measure.mean * measure.scale)
        text = f"{named(row.label, row.point)}: {spread(row.measure, measure)}"
        found.append(Point(*where, text))
    return found


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
        axes.axhline(y, color=look.colour, linestyle=look.linestyle)
    placed = [(x + shift, s) for x, s in points if x is not None]
    axes.errorbar(
        [x for x, _ in placed],
        [s.mean * measure.scale for _, s in placed],
        [(s.deviation or 0.0) * measure.scale for _, s in placed],
        color=look.colour,
        linestyle=look.linestyle,
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


def titled(name: str, measure: Measure) -> str:
    """A name and its unit."""
    return f"{name} ({measure.unit})" if measure.unit else name
