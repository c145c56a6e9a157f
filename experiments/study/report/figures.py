"""The figures of a report, as files and as parts of its page; imports matplotlib.

A figure is data, and one function draws all kinds of it.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.cli.terminal import size
from experiments.study.analysis import formatting
from experiments.study.analysis.formatting import duration, named, number, spread
from experiments.study.analysis.profiles import profiles, times_of
from experiments.study.analysis.quantities import Quantity, is_empty, quantities
from experiments.study.analysis.results import ONE_NOMINAL, Curve, Report, Row
from experiments.study.report.styles import TEMPLATES, VARIABLES, Styles, styles
from experiments.study.statistics import Measure
from experiments.training import records

style = partial(matplotlib.style.context, TEMPLATES / "figures.mplstyle")
COLOUR = re.compile("|".join(VARIABLES))
HEAD = re.compile(r"<metadata>.*?</metadata>|<\?xml.*?\?>|<!DOCTYPE.*?>", re.DOTALL)
WORDS: dict[str, Callable[[float], str]] = {"bytes": size, "time": duration}
WORDS["plain"] = number
DOTTED = {"color": "0.4", "linewidth": 1, "linestyle": ":"}
FAR = 32.0  # the end of the axis of profiles


class Line(NamedTuple):
    """A line with a band, in the pane of its point of the sweep; "" means in all."""

    label: str
    point: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Plot(NamedTuple):
    """A figure.

    Attributes:
        name: name of its file.
        group: the section of the page that shows it.
        title: its subject, with the unit.
        lines: what it shows.
        x_label: the quantity of the x axis.
        kind: how its numbers are written: plain, bytes or time.
        log: which axes are logarithmic: "", "x", "y" or "xy".
        limits: the ends of the y axis; None leaves them to matplotlib.
        bars: whether bands are drawn as error bars.
        target: a horizontal line, if any.
        note: a caption.
        folded: the heading that it is folded under; "" if it is always shown.
        more: draws what is not a line.
    """

    name: str
    group: str
    title: str
    lines: Sequence[Line]
    x_label: str
    kind: str = "plain"
    log: str = ""
    limits: tuple[float, float] | None = None
    bars: bool = False
    target: float | None = None
    note: str = ""
    folded: str = ""
    more: Callable[[Axes], Any] = lambda axes: None


def plots(report: Report) -> list[Plot]:
    """Returns the figures that the report has data for, named like their files."""
    makers = (_tradeoff, _curves, _profiles, _sweep, _tuning)
    found = [_differences(report)] if any(map(_is_compared, report.rows)) else []
    found += [plot for maker in makers for plot in maker(report) if plot.lines]
    slugs = [re.sub(r"[^a-z0-9]+", "-", x.name.lower()).strip("-") for x in found]
    counts = [slugs[:i].count(slug) for i, slug in enumerate(slugs)]
    names = [f"{x}--{n + 1}" if n else x for x, n in zip(slugs, counts, strict=True)]
    return [x._replace(name=name) for x, name in zip(found, names, strict=True)]


def save(plot: Plot, report: Report, folder: Path, dpi: int) -> str:
    """Writes a figure as SVG and PNG; returns the SVG to put into a page."""
    look = styles({row.label: row.algo for row in report.rows})
    figure = draw(plot, look)
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": plot.name}), io.BytesIO() as file:
        figure.savefig(file, format="svg", metadata=metadata)
        svg = HEAD.sub("", file.getvalue().decode()).strip()
    records.write(folder / f"{plot.name}.svg", f"{svg}\n")
    with io.BytesIO() as png:
        figure.savefig(png, format="png", dpi=dpi)
        records.write(folder / f"{plot.name}.png", png.getvalue())
    # A page has its own colours, light and dark, and its own size.
    themed = COLOUR.sub(lambda x: VARIABLES[x[0]], svg.replace("#ffffff", "none"))
    # Ids are unique in a page.
    themed = re.sub(
        r'(id="|#)((?:figure|axes|patch|line|text|legend|xtick|ytick|'
        r"matplotlib|PolyCollection|FillBetweenPoly|LineCollection)"
        r"[\w.]*_\d+)",
        rf"\g<1>{plot.name}-\g<2>",
        themed,
    )
    whole = rf'<svg role="img" aria-label="{plot.title}" viewBox="\1"'
    return re.sub(r'<svg .*?viewBox="([^"]*)"', whole, themed, count=1, flags=re.DOTALL)


def draw(plot: Plot, look: Styles) -> Figure:
    """Draws a pane for each point of the sweep, with a legend below."""
    points = [*dict.fromkeys(x.point for x in plot.lines if x.point)] or [""]
    tall = 1.4 + (3.0 if len(points) == 1 else 2.1 * len(points))
    figure = Figure(figsize=(5, tall), dpi=72, layout="constrained")
    panes = figure.subplots(len(points), sharex=True, squeeze=False)[:, 0]
    for point, axes in zip(points, panes, strict=True):
        axes.set_title(formatting.point_text(point))
        for line in (x for x in plot.lines if x.point in (point, "")):
            _draw_line(axes, line, look[line.label], plot.bars)
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            if name in plot.log:
                axes.set(**{f"{name}scale": "log"})
            words = WORDS[plot.kind if name == "x" else "plain"]
            axis.set_major_formatter(lambda x, _, words=words: words(x))
            axis.set_minor_formatter("")
        axes.locator_params("x", nbins=5) if "x" not in plot.log else None
        if plot.limits is not None:
            axes.set_ylim(*plot.limits)
        if plot.target is not None:
            axes.axhline(plot.target, **DOTTED)
        plot.more(axes)
    panes[-1].set_xlabel(plot.x_label)
    figure.suptitle(textwrap.fill(plot.title, 46), x=0.02, ha="left")
    handles = dict(zip(*reversed(panes[0].get_legend_handles_labels()), strict=True))
    columns = max(1, int(60 / (max(map(len, handles), default=60) + 6)))
    figure.legend(
        [*handles.values()],
        [textwrap.fill(x, 56) for x in handles],
        loc="outside lower left",
        ncols=columns,
    )
    return figure


def _draw_line(axes: Axes, line: Line, look: dict[str, Any], bars: bool) -> None:
    if bars:
        error = [line.y - line.low, line.high - line.y]
        axes.errorbar(line.x, line.y, error, label=line.label, elinewidth=1.2, **look)
        return
    band = {"color": look["color"], "alpha": 0.16, "linewidth": 0}
    axes.fill_between(line.x, line.low, line.high, **band)
    every = max(1, len(line.x) // 8)
    axes.plot(line.x, line.y, label=line.label, markevery=every, **look)


def _titled(by: Measure, unit: str) -> str:
    return formatting.sentence(f"{by.name} ({unit})" if unit else by.name)


def _is_compared(row: Row) -> bool:
    return row.comparison.difference is not None


def _differences(report: Report) -> Plot:
    """Differences from the baseline, with 95 % intervals around a line at 0."""
    rows, by, lines = [*filter(_is_compared, report.rows)], report.measure, []
    for i, row in enumerate(rows):
        mean, low, high, *_ = row.comparison.difference or (0.0, None, None)
        ends = (mean if x is None else x for x in (mean, low, high))
        mean, low, high = (np.array([by.scale * x]) for x in ends)
        lines.append(Line(row.label, "", mean, np.array([-i]), low, high))

    def rows_of(axes: Axes) -> None:
        for line in lines:
            axes.hlines(line.y, line.low, line.high, color="0.3", linewidth=2)
        axes.axvline(0, **DOTTED)
        axes.set_yticks([-i for i in range(len(rows))], [named(row) for row in rows])

    better = "better →" if by.higher_is_better else "← better"
    return Plot(
        "differences",
        "answer",
        f"Difference from {report.baseline} in {_titled(by, by.difference_unit)}",
        [x._replace(low=x.y, high=x.y) for x in lines],
        "95 % interval" + f"; {better}" * (report.terms != ONE_NOMINAL),
        limits=(-len(rows) + 0.5, 0.5),
        bars=True,
        more=rows_of,
    )


def _finals(rows: Sequence[Row], x: Sequence[float], by: Measure) -> Line:
    """Final means, with a standard deviation to either side."""
    found = [row.measure for row in rows if row.measure]
    y = by.scale * np.array([s.mean for s in found])
    around = by.scale * np.array([s.deviation or 0.0 for s in found])
    return Line(rows[0].label, "", np.array(x), y, y - around, y + around)


def _tradeoff(report: Report) -> Iterator[Plot]:
    """The final measure by bytes sent, if three numbers of bytes differ."""
    by = report.measure
    rows = [r for r in report.rows if r.bytes_per_worker and formatting.is_known(r)]
    if report.sweep or len({row.bytes_per_worker for row in rows}) < 3:
        return
    lines = [_finals([row], [row.bytes_per_worker or 0.0], by) for row in rows]
    title = f"{_titled(by, by.unit)} at the end, by bytes sent by each worker"
    note = "; ".join(f"{r.label}: {spread(r.measure, by)}" for r in rows)
    name, label = f"{by.key} at the end", "bytes sent by each worker (log)"
    given = {"kind": "bytes", "log": "x", "bars": True, "note": f"{note}."}
    yield Plot(name, "answer", title, lines, label, **given)


def _curves(report: Report) -> Iterator[Plot]:
    """Every metric against steps; the compared ones against bytes and time, too."""
    most = {
        n.name: max((c.seconds.get(n.name, [0])[-1] for c in report.curves), default=0)
        for n in report.networks
    }
    slowest = max(most, key=most.__getitem__, default="")
    for each in quantities(report):
        by, unit = each.by, each.by.unit
        if is_empty(report, each):
            continue
        views: list[tuple[str, str, str, Callable[[Curve], Any], str]] = [
            ("steps", "local steps", "plain", lambda c: c.steps, "by steps")
        ]
        if each.group in ("measure", "loss") and by.key != "train_loss":
            label = "bytes sent by each worker"
            found = (lambda c: c.bytes_per_worker), "by bytes sent"
            views += [("bytes", label, "bytes", *found)]
            for n in most:
                seconds = lambda c, n=n: c.seconds.get(n)  # noqa: E731
                views += [(f"time {n}", "modelled time", "time", seconds, f"on {n}")]
        limits, log = None, ""
        for slug, label, kind, values, how in views:
            lines = [*_lines(report, by, values)]
            if slug == "steps":
                limits, log = _limits(each, lines)
            is_log = kind == "bytes"
            yield Plot(
                f"{by.key} by {slug}",
                each.group,
                f"{_titled(by, unit)} {how}",
                lines,
                label + " (log)" * is_log,
                kind,
                log + "x" * is_log,
                limits,
                target=_target(report, each),
                folded=formatting.sentence(by.name)
                if kind == "time" and how != f"on {slowest}"
                else "",
            )


def _target(report: Report, each: Quantity) -> float | None:
    if report.target is None or each.group != "measure":
        return None
    return report.target * each.by.scale


def _lines(
    report: Report, by: Measure, values: Callable[[Curve], Any]
) -> Iterator[Line]:
    """Yields the curves that have a finite value and a positive x."""
    for curve in report.curves:
        band, x = curve.bands.get(by.key), values(curve)
        if band is None or not x or max(x) <= 0:
            continue
        mean, low, high = (np.array(part, float) * by.scale for part in band)
        if np.isfinite(mean).any():
            yield Line(curve.label, curve.point, np.array(x, float), mean, low, high)


def _limits(
    each: Quantity, lines: Sequence[Line]
) -> tuple[tuple[float, float] | None, str]:
    """Returns the range of y that shows the differences, and "y" if it is wide.

    The first quarter of a run may lie outside, and so may a run that diverges.
    """
    late = [x[len(x) // 4 :] for line in lines for x in (line.y, line.low, line.high)]
    found = np.concatenate([*late, []])
    found = found[np.isfinite(found)]
    if not len(found):
        return None, ""
    low, high = float(found.min()), float(found.max())
    if not each.by.higher_is_better:
        ends = [float(np.nanmedian(x.y[len(x.y) // 4 :])) for x in lines]
        high = min(high, 8 * min(map(abs, ends)) or high)
    if each.log and 0 < low < high / 50:
        return (low / 1.5, high * 1.5), "y"
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 0.5
    return (low - margin, high + margin), ""


def _profiles(report: Report) -> Iterator[Plot]:
    """Shares of workloads by time over the fastest's."""
    found = profiles(times_of(report.rows))
    if len(found) < 2 or len(found[0].ratios) < 2:
        return
    lines = []
    for each in found[:12]:
        at = [*dict.fromkeys([1.0, *(x for x in each.ratios if x <= FAR), FAR])]
        x, y = np.repeat(at, 2)[1:], np.repeat([each.share(a) for a in at], 2)[:-1]
        lines.append(Line(each.label, "", x, y, y, y))
    title = "Share of workloads by time to the target over the fastest's"
    label = "times as long as the fastest (log)"
    scores = "; ".join(f"{each.label} {each.score:.2f}" for each in found)
    note = f"Performance profiles, as in AlgoPerf. Scores: {scores}."
    yield Plot("profiles", "time", title, lines, label, log="x", note=note)


def _places(report: Report) -> tuple[dict[str, float], str]:
    """Returns the x of each point of the sweep, and "x" if they grow by factors."""
    points = [p for p in dict.fromkeys(row.point for row in report.rows) if p]
    try:
        at = {point: float(point.partition("=")[2]) for point in points}
    except ValueError:
        return {point: float(i) for i, point in enumerate(points)}, ""
    is_wide = at and min(at.values()) > 0 and max(at.values()) >= 4 * min(at.values())
    return at, "x" if is_wide else ""


def _ticks(at: dict[str, float], axes: Axes) -> None:
    axes.set_xticks([*at.values()], [x.partition("=")[2] for x in at])


def _sweep(report: Report) -> Iterator[Plot]:
    """The final measure against the swept value."""
    at, log = _places(report)
    by, rows = report.measure, [*filter(formatting.is_known, report.rows)]
    lines = []
    for label in dict.fromkeys(row.label for row in rows) if at else ():
        own = [row for row in rows if row.label == label]
        if not own[0].point:  # without the flag it is the same everywhere
            own = own[:1] * len(at)
        x = [at.get(r.point, p) for r, p in zip(own, at.values(), strict=False)]
        lines.append(_finals(own, x, by))
    name, title = f"{by.key} by {report.sweep}", _titled(by, by.unit)
    given = {"log": log, "bars": True, "more": partial(_ticks, at)}
    yield Plot(
        name, "sweep", f"{title} by {report.sweep}", lines, report.sweep, **given
    )


def _tuning(report: Report) -> Iterator[Plot]:
    """The trials of each tuned flag, and its best value against the swept one."""
    at, log = _places(report)
    by = report.measure
    for flag in dict.fromkeys(t.flag for t in report.tuning):
        tried = [t for t in report.tuning if t.flag == flag]
        values = [x for t in tried for x in t.values]
        is_log = min(values) > 0 and ("lr" in flag or max(values) > 10 * min(values))
        best = []
        for label in dict.fromkeys(t.label for t in tried):
            own = [t for t in tried if t.label == label and t.point in at]
            x, y = [at[t.point] for t in own], [t.chosen for t in own]
            low = [t.chosen if t.low is None else t.low for t in own]
            high = [t.chosen if t.high is None else t.high for t in own]
            best += [Line(label, "", *map(np.array, (x, y, low, high)))] if own else []
        title, given = f"Best {flag} by {report.sweep}", {"bars": True}
        given |= {"log": log + "y" * is_log, "more": partial(_ticks, at)}
        yield Plot(title.lower(), "sweep", title, best, report.sweep, **given)
        scores = [
            (t, by.scale * np.array([math.nan if s is None else s for s in t.scores]))
            for t in tried
        ]
        lines = [Line(t.label, t.point, np.array(t.values), y, y, y) for t, y in scores]
        edges = [f"{named(t)} ({number(t.chosen)})" for t in tried if t.at_edge]
        name = _titled(by, by.unit).removeprefix("Test ")
        yield Plot(
            f"tuning {flag}",
            "tuning",
            f"{formatting.sentence(name)} on validation data by {flag}",
            lines,
            flag + " (log)" * is_log,
            log="x" * is_log,
            note=f"Best at the edge of the range: {', '.join(edges)}." * bool(edges),
        )
