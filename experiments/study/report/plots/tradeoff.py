"""The figure of the trade-off: what is reached at the end, against what was sent."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from experiments.cli import terminal
from experiments.study.analysis.formatting import known, sentence, spread
from experiments.study.analysis.results import Report, Row
from experiments.study.report.axes import Plot, Range, titled
from experiments.study.report.charts import Chart, Line, draw_chart, legend_texts
from experiments.study.report.styles import LIGHT, Styles

LABELLED = 12  # points that can all have their label; of more only the front has
FEW = 8  # fewer points are all in the picture


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """A point an algorithm, where three or more differ in what they send."""
    rows = [r for r in report.rows if r.bytes_per_worker and known_measure(r)]
    if not report.sweep and len({row.bytes_per_worker for row in rows}) > 2:
        yield plot(report, rows, styles)


def known_measure(row: Row) -> bool:
    """Whether a row has a mean to draw."""
    return row.measure is not None and known(row.measure.mean)


def plot(report: Report, rows: Sequence[Row], styles: Styles) -> Plot:
    """The measure at the end by bytes, and the front."""
    measure = report.measure
    name = titled(sentence(measure.name), measure.unit)
    title = f"{name} at the end, by bytes sent by each worker"
    points = [point(report, row) for row in rows]
    best = front(points, measure.higher_is_better)
    lines, far = near(points, [line.label for line in best])
    texts = legend_texts(report)
    if len(lines) > LABELLED:
        texts = {line.label: texts[line.label] for line in best}
    xs = [float(line.x[0]) for line in lines]
    low = min(float(line.low[0]) for line in lines)
    high = max(float(line.high[0]) for line in lines)
    chart = Chart(
        title,
        "bytes sent by each worker (log)",
        Range(min(xs), max(xs), True, "bytes").widened(0.05),
        Range(low, high).widened(0.05),
        lines,
        styles,
        texts,
        bars=True,
    )
    ends = ", ".join(line.label for line in best)
    behind = ", ".join(line.tips[0] for line in far)
    outside = f" Outside the picture: {behind}." if far else ""
    return Plot(
        f"{measure.key} at the end",
        "answer",
        title,
        f"{title}: {'; '.join(line.tips[0] for line in [*lines, *far])}.",
        "Bars: one standard deviation to each side. Dotted: no algorithm that sends as "
        f"little has a better mean ({ends}).{outside}",
        partial(draw, chart, best),
    )


def point(report: Report, row: Row) -> Line:
    """A line of one point."""
    assert row.measure and row.bytes_per_worker
    scale = report.measure.scale
    x, y = np.array([row.bytes_per_worker]), np.array([row.measure.mean * scale])
    around = (row.measure.deviation or 0.0) * scale
    text = f"{row.label}: {spread(row.measure, report.measure)}"
    tip = f"{text}, {terminal.size(row.bytes_per_worker)}"
    return Line(row.label, "", x, y, y - around, y + around, [tip])


def near(lines: Sequence[Line], front: Sequence[str]) -> tuple[list[Line], list[Line]]:
    """The points in the picture, and those so far behind that all others would touch.

    Far is more than three times as far from the best as the median, and beyond the
    bars of the others. Of fewer than 8 points all are in the picture.

    Args:
        lines: the points.
        front: labels of those that are always in the picture, the best one last.
    """
    means = {line.label: float(line.y[0]) for line in lines}
    behind = {label: abs(mean - means[front[-1]]) for label, mean in means.items()}
    most = 3 * float(np.median([*behind.values()]))
    near = {label for label, gap in behind.items() if gap <= most} | {*front}
    drawn = [line for line in lines if line.label in near]
    low = min(float(line.low[0]) for line in drawn)
    high = max(float(line.high[0]) for line in drawn)
    if len(lines) < FEW:
        near |= {*means}
    near |= {label for label, mean in means.items() if low <= mean <= high}
    inside = [line for line in lines if line.label in near]
    return inside, [line for line in lines if line.label not in near]


def front(lines: Sequence[Line], higher_is_better: bool) -> list[Line]:
    """The points that no other beats with as few bytes, fewest bytes first."""
    sign = -1.0 if higher_is_better else 1.0
    found: list[Line] = []
    for line in sorted(lines, key=lambda x: (float(x.x[0]), sign * float(x.y[0]))):
        if not found or sign * line.y[0] < sign * found[-1].y[0]:
            found.append(line)
    return found


def draw(chart: Chart, best: Sequence[Line]) -> Figure:
    """Draws the points, and steps along the front."""
    figure = draw_chart(chart)
    xs = [*(float(line.x[0]) for line in best), chart.x.high]
    ys = [*(float(line.y[0]) for line in best), float(best[-1].y[0])]
    figure.axes[0].step(
        xs,
        ys,
        where="post",
        color=LIGHT["muted"],
        linewidth=1,
        linestyle=(0, (1, 2)),
        zorder=0,
    )
    return figure
