"""Figures of final results: differences from the baseline, and accuracy by bytes."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import compress

import numpy as np
from matplotlib.figure import Figure

from experiments.cli import terminal
from experiments.study.analysis import formatting
from experiments.study.analysis.formatting import named
from experiments.study.analysis.results import ONE_NOMINAL, Report, Row
from experiments.study.report import charts
from experiments.study.report.charts import Chart, Line, Plot, Range, titled
from experiments.study.report.styles import LIGHT, Styles
from experiments.study.statistics import Difference

Compared = Sequence[tuple[Row, Difference]]

ROW = 40  # height of an algorithm in the figure of differences, units
BARS = {"interval": "thick: 95 % interval", "sd": "thin: one deviation to each side"}
TOO_FEW = (
    "Thin bars are one standard deviation of the differences to each side: there are "
    "too few seeds for an interval."
)
LABELLED = 12  # most points that all get labels; of more, only the front does
FEW = 8  # fewer points than this are all in the picture


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """Yields the differences; and a trade-off if three numbers of bytes differ."""
    pairs = [(row, row.comparison.difference) for row in report.rows]
    if compared := [(row, difference) for row, difference in pairs if difference]:
        yield differences(report, compared, styles)
    rows = [r for r in report.rows if r.bytes_per_worker and formatting.is_known(r)]
    if not report.sweep and len({row.bytes_per_worker for row in rows}) > 2:
        yield tradeoff(report, rows, styles)


def differences(report: Report, compared: Compared, styles: Styles) -> Plot:
    """Returns the figure of differences from the baseline, around a line at 0."""
    name = f"Difference from {report.baseline} in {report.measure.name}"
    title = titled(name, report.measure.difference_unit)
    text = "; ".join(f"{named(row)} {row.comparison.clause}" for row, _ in compared)
    note = TOO_FEW if any(bar(x)[2] == "sd" for _, x in compared) else ""
    draw = partial(draw_differences, report, compared, styles, title)
    return Plot("differences", "answer", title, f"{title}. {text}.", note, draw)


def bar(difference: Difference) -> tuple[float, float, str]:
    """Returns the extents of a bar below and above the mean, and its kind."""
    mean, low, high, deviation, *_ = difference
    if low is not None and high is not None:
        return mean - low, high - mean, "interval"
    return deviation or 0.0, deviation or 0.0, "" if deviation is None else "sd"


def draw_differences(
    report: Report, compared: Compared, styles: Styles, title: str
) -> Figure:
    """Draws a panel per value of the sweep, with a row per algorithm."""
    rows: dict[str, list[tuple[Row, Difference]]] = {}
    ends, kinds, factor = [0.0], set(), report.measure.scale
    for row, difference in compared:
        rows.setdefault(row.point, []).append((row, difference))
        under, over, kind = bar(difference)
        ends += [difference.mean - under, difference.mean + over]
        kinds.add(kind)
    below = [text for kind, text in BARS.items() if kind in kinds]
    if report.terms != ONE_NOMINAL:
        below += ["better →" if report.measure.higher_is_better else "← better"]
    most = max(map(len, rows.values()))
    # Some algorithms may lack the swept flag.
    bare = f"without {report.sweep}" if any(rows) else ""
    heads = [formatting.point_text(point) or bare for point in rows]
    figure, panes = charts.panels(title, heads, ", ".join(below), ROW * most)
    for axes, own in zip(panes, rows.values(), strict=True):
        x = Range(min(ends) * factor, max(ends) * factor)
        charts.scale(axes, "x", x.widened(0.03), 6)
        axes.set(ylim=(most, 0), yticks=[])
        for i, (row, difference) in enumerate(own):
            # The label is above its bar: beside it, no room is left on a phone.
            first, *rest = charts.wrapped(row.label, charts.WIDTH - 24)
            text = f"{first} …" if rest else first
            axes.text(0, i + 0.38, text, transform=axes.get_yaxis_transform())
            # The line at 0 is in pieces, because one line would cross the labels.
            axes.plot([0, 0], [i + 0.47, i + 0.93], color=LIGHT["muted"], linewidth=1)
            under, over, kind = bar(difference)
            axes.errorbar(
                difference.mean * factor,
                i + 0.7,
                xerr=[[under * factor], [over * factor]],
                elinewidth=2.5 if kind == "interval" else 1,
                markersize=8,
                **styles[row.label],
            )
            tip = f"{row.label}: {row.comparison.clause}"
            charts.add_tips(axes, [difference.mean * factor], [i + 0.7], [tip])
    return figure


def tradeoff(report: Report, rows: Sequence[Row], styles: Styles) -> Plot:
    """Returns the figure of the final measure by bytes sent, with its front."""
    measure = report.measure
    title = (
        f"{titled(measure.name, measure.unit)} at the end, by bytes sent by each worker"
    )
    points = []
    for row in rows:
        sent = row.bytes_per_worker or 0.0
        reached = formatting.spread(row.measure, measure)
        tip = f"{row.label}: {reached}, {terminal.size(sent)}"
        points.append(charts.line_of_rows(report, [row], [sent], [tip]))
    best = front(points, measure.higher_is_better)
    lines, far = near(points, best)
    texts = charts.legend_texts(report)
    if len(lines) > LABELLED:
        texts = {line.label: texts[line.label] for line in best}
    xs = [float(line.x[0]) for line in lines]
    chart = Chart(
        title,
        "bytes sent by each worker (log)",
        Range(min(xs), max(xs), True, "bytes").widened(0.05),
        charts.extent(lines).widened(0.05),
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
        "Bars: one standard deviation to each side. Dotted line: the algorithms that "
        f"no other beats with as few bytes ({ends}).{outside}",
        partial(draw_tradeoff, chart, best),
    )


def near(lines: Sequence[Line], best: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Returns the points to show, and those so far behind that others would overlap.

    A point is left out if it is more than three times as far from the best as the
    median and beyond the bars of the others. Fewer than 8 points are all shown.

    Args:
        lines: the points.
        best: the points that are always shown, the best one last.
    """
    means = np.array([line.y[0] for line in lines])
    behind = np.abs(means - best[-1].y[0])
    labels = {line.label for line in best}
    shown = np.array([line.label in labels for line in lines])
    shown |= behind <= 3 * np.median(behind)
    low, high, *_ = charts.extent([*compress(lines, shown)])
    shown |= (low <= means) & (means <= high) | (len(lines) < FEW)
    return [*compress(lines, shown)], [*compress(lines, ~shown)]


def front(lines: Sequence[Line], higher_is_better: bool) -> list[Line]:
    """Returns the points that none with as few bytes beats, fewest bytes first."""
    sign = -1.0 if higher_is_better else 1.0
    found: list[Line] = []
    for line in sorted(lines, key=lambda x: (float(x.x[0]), sign * float(x.y[0]))):
        if not found or sign * line.y[0] < sign * found[-1].y[0]:
            found.append(line)
    return found


def draw_tradeoff(chart: Chart, best: Sequence[Line]) -> Figure:
    """Draws the points, and a stepped line along the front."""
    figure = charts.draw_chart(chart)
    xs = [*(float(line.x[0]) for line in best), chart.x.high]
    ys = [float(line.y[0]) for line in [*best, best[-1]]]
    figure.axes[0].step(xs, ys, where="post", zorder=0, **charts.DOTTED)
    return figure
