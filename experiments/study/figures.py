"""The figures of a report, as files and as parts of its page.

A figure is data, and one function draws all kinds of it. It is as wide as a phone, in
units of 1/72 inch, which are CSS pixels in a page.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments import files
from experiments.command import terminal
from experiments.study import sentences
from experiments.study.results import ONE_NOMINAL, Report, Row
from experiments.study.runs import Tuning
from experiments.study.sentences import grouped, named, number
from experiments.study.statistics import LOSS, Measure, named_measure

if TYPE_CHECKING:
    # matplotlib takes a second to import, which --help must not wait for.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).with_name("templates")
CSS = (TEMPLATES / "report.css").read_text()
# All colours are defined in the stylesheet; its first block is for the light page.
LIGHT = dict(re.findall(r"--([\w-]+): (#\w{6})", CSS.partition("@media")[0]))
VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}

# Seven hues, then each in two other tones. Color-blind readers can distinguish them,
# too: simulated after Machado (2009), any two of the first seven and any two tones of
# a hue are 10 or more apart in CIE Lab, where 2.3 is just noticeable.
HUES = 7
COLOURS = [colour for name, colour in LIGHT.items() if name.startswith("series-")]
DASHES = ((), (6, 2), (2, 1.5), (7, 2, 1.5, 2), (10, 2))
MARKERS = "os^DvPX"  # matplotlib's names; the page's template has their shapes

Styles = Mapping[str, dict[str, Any]]

WIDTH = 360  # of every figure
# The width of an average character in DejaVu Sans, which is wider than a page's fonts.
CHARACTER = 6.1
SIGN = 36  # width of a line's sample in a legend, with the space beside it
MOST = 5  # ticks of an axis
MANY = 12  # lines that a legend names; of more points, only the best
# Views of a metric; others are times on a network, by its name.
STEPS, BYTES = "local steps", "most bytes sent by a worker"
# The end of a file's name, the kind and the label of the x axis, and the title's end.
VIEWS = {
    STEPS: ("steps", "plain", STEPS, "by steps"),
    BYTES: ("bytes", "bytes", BYTES, "by bytes sent"),
}
DOTTED = {"color": LIGHT["muted"], "linewidth": 1, "linestyle": (0, (1, 2))}

SPREAD = "standard deviation of the workers' training losses"
COSINE = "mean cosine between the workers' displacements"
# If higher is better, a metric is bounded like an accuracy: no run can leave the axes.
INSIDE = (
    Measure("worker_loss_spread", SPREAD, False),
    Measure("drift", "spread of the replicas before a sync", False),
    Measure("divergence", "spread of the replicas", False),
    Measure("pseudo_gradient", "norm of the pseudo-gradient", False),
    Measure("displacement_cosine", COSINE, True),
)

WORDS = {"plain": number, "bytes": terminal.size, "time": terminal.duration}
TENS = [10.0**k for k in range(-30, 31)]
TIMES = [*(x for x in TENS if x <= 10), 60, 600, 3600, 36000]
TIMES += [86400 * x for x in TENS if x >= 1]

TAG, ID = re.compile(r"<[^>]*>"), re.compile(r' id="|href="#|url\(#')
HEAD = re.compile(r"<metadata>.*?</metadata>|<\?xml.*?\?>|<!DOCTYPE.*?>", re.DOTALL)
# Numbers far finer than a pixel make up a third of a page's bytes.
LONG = re.compile(r"\d+\.\d{3,}")
FONT = re.compile(r"font-family: [^;\"]*;?\s*|(?<=px) 'DejaVu Sans'[^;\"]*")
WHOLE = re.compile(r'viewBox="0 0 (\S+) (\S+)"')
COLOUR = re.compile("|".join(VARIABLES))

Ends = tuple[float, float]


class Line(NamedTuple):
    """A line of a figure, with arrays of equal length.

    Attributes:
        label: label of the algorithm.
        point: value of the sweep; "" puts the line in all panels.
        x: the x values.
        y: the y values, NaN for gaps.
        low: the lower end of the band; y for no band.
        high: the upper end of the band.
        ring: the x value that was chosen, if any: its point has a ring.
        crosses: x values whose runs diverged: crosses at the bottom.
    """

    label: str
    point: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    ring: float | None = None
    crosses: Sequence[float] = ()


class Plot(NamedTuple):
    """A figure.

    Attributes:
        name: name of its file.
        group: the section of the page that shows it: answer, sweep, measure, loss,
            replicas, more or tuning.
        title: its subject, with the unit.
        lines: what it shows, in the order of the legend.
        x_label: the quantity of the x axis.
        kind: how numbers on the x axis are written: plain, bytes or time.
        log: the logarithmic axes: "", "x", "y" or "xy".
        limits: the ends of the y axis; None for those of the lines.
        x_limits: the ends of the x axis; None for those of the lines.
        ticks: x values by their texts; None for round numbers.
        bars: the axis along which bands are drawn as bars: "", "x" or "y". Along x
            they are rows without numbers on the y axis.
        legend: the labels in the legend; None for all.
        target: the y value of a horizontal line, and its text.
        height: the height of a panel; None for the usual one.
        note: a caption; "" for none.
        more: draws what is not a line.
    """

    name: str
    group: str
    title: str
    lines: Sequence[Line]
    x_label: str
    kind: str = "plain"
    log: str = ""
    limits: Ends | None = None
    x_limits: Ends | None = None
    ticks: Mapping[str, float] | None = None
    bars: str = ""
    legend: Sequence[str] | None = None
    target: tuple[float, str] | None = None
    height: float | None = None
    note: str = ""
    more: "Callable[[Axes], Any]" = lambda axes: None


def styles(algos: Mapping[str, str]) -> Styles:
    """Gives each label its own style: one hue per algorithm, one tone per variant.

    Args:
        algos: names of algorithms by label, in the order of the legend.

    Returns:
        Properties of matplotlib lines by label: color, linestyle and marker.
    """
    hues = list(dict.fromkeys(algos.values()))
    seen = dict.fromkeys(hues, 0)
    found = {}
    for i, (label, algo) in enumerate(algos.items()):
        turn, hue = divmod(hues.index(algo), HUES)
        tone = (turn + seen[algo]) % (len(COLOURS) // HUES)
        seen[algo] += 1
        # Five dashes and seven markers: the dash moves on by one more step each round,
        # so that no combination repeats before 35 labels.
        dash = DASHES[(i + i // len(MARKERS)) % len(DASHES)]
        found[label] = {
            "color": COLOURS[tone * HUES + hue],
            "linestyle": (0, dash) if dash else "-",
            "marker": MARKERS[i % len(MARKERS)],
        }
    return found


def style() -> AbstractContextManager[None]:
    """Returns the context in which figures are drawn and written."""
    import matplotlib.style

    return matplotlib.style.context(TEMPLATES / "figures.mplstyle")


def plots(report: Report) -> list[Plot]:
    """Returns the figures that the report has data for, named like their files."""
    makers = _differences, _tradeoff, _curves, _sweep, _tuning
    found: dict[str, Plot] = {}
    for plot in (x for maker in makers for x in maker(report) if x.lines):
        slug = re.sub(r"[^a-z0-9]+", "-", plot.name.lower()).strip("-")
        same = [x for x in found if x.partition("--")[0] == slug]
        name = f"{slug}--{len(same) + 1}" if same else slug
        found[name] = plot._replace(name=name)
    return [*found.values()]


def save(plot: Plot, look: Styles, folder: Path, dpi: int) -> str:
    """Writes a figure as SVG and PNG; returns the SVG for a page."""
    figure = draw(plot, look)
    text = svg(plot, figure)
    files.write(folder / f"{plot.name}.svg", text)
    # Takes a third of the usual time and a fifth more bytes.
    quick = {"compress_level": 1}
    _write(figure, folder / f"{plot.name}.png", dpi=dpi, pil_kwargs=quick)
    return themed(plot, text)


def save_untitled(plot: Plot, look: Styles, folder: Path) -> None:
    """Writes a figure for a paper, whose caption has its title, as PDF and SVG."""
    axis = "; ".join(filter(None, (plot.title, plot.x_label)))
    figure = draw(plot._replace(title="", x_label=axis), look)
    files.write(folder / f"{plot.name}.svg", svg(plot, figure))
    _write(figure, folder / f"{plot.name}.pdf", metadata={"CreationDate": None})


def _write(figure: "Figure", path: Path, **how: Any) -> None:
    with io.BytesIO() as file:
        figure.savefig(file, format=path.suffix[1:], **how)
        files.write(path, file.getvalue())


def svg(plot: Plot, figure: "Figure") -> str:
    """Returns a figure as the text of an SVG file."""
    import matplotlib

    # Without a date, the same study gives the same bytes.
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": plot.name}), io.StringIO() as file:
        figure.savefig(file, format="svg", metadata=metadata)
        found = HEAD.sub("", file.getvalue()).strip()
    found = TAG.sub(lambda x: LONG.sub(lambda y: f"{float(y[0]):.2f}", x[0]), found)
    named = f'<svg role="img" aria-label="{escape(_plain(plot.title))}" '
    return found.replace("<svg ", named, 1) + "\n"


def themed(plot: Plot, text: str) -> str:
    """Returns an SVG for a page: in its fonts and colours, with ids of its own."""

    def own(tag: re.Match[str]) -> str:
        found = FONT.sub("", tag[0]).replace("#ffffff", "none")
        found = ID.sub(rf"\g<0>{plot.name}-", found)
        return COLOUR.sub(lambda x: VARIABLES[x[0]], found)

    # Only tags: texts between them are the user's.
    text = TAG.sub(own, text.strip())
    text = re.sub(r' (width|height|version)="[^"]*"', "", text, count=3)
    # A page has its own margins: the title begins where the page's text does.
    return WHOLE.sub(
        lambda x: f'viewBox="10 4 {float(x[1]) - 10:g} {float(x[2]) - 8:g}"', text, 1
    )


def draw(plot: Plot, look: Styles) -> "Figure":
    """Draws a panel for each point of the sweep, with a legend below."""
    from matplotlib.figure import Figure

    points = [*dict.fromkeys(x.point for x in plot.lines if x.point)] or [""]
    title = _wrapped(plot.title, (WIDTH - 20) / 1.15)  # bold
    below = _wrapped(plot.x_label, 0.8 * WIDTH)
    height = plot.height or (150 if len(points) > 1 else 210)
    tall = sum(height + (25 if point else 8) for point in points)
    tall += 17 * f"{title}\n{below}".count("\n") + 57
    figure = Figure(figsize=(WIDTH / 72, tall / 72), dpi=72, layout="constrained")
    figure.suptitle(title, x=10 / WIDTH, ha="left")
    alike: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}
    scales = {f"{name}scale": "log" for name in plot.log}
    panels = figure.subplots(len(points), **alike, subplot_kw=scales)[:, 0]
    if plot.limits:  # first: matplotlib would warn of a line of zeros on a log axis
        panels[0].set_ylim(plot.limits)
    for point, axes in zip(points, panels, strict=True):
        axes.set_title(_plain(sentences.point_text(point)))
        for line in (x for x in plot.lines if x.point in (point, "")):
            _draw_line(axes, line, look, plot)
        if plot.target is not None:
            axes.axhline(plot.target[0], **DOTTED)
        plot.more(axes)
    panels[0].set(xlim=plot.x_limits, ylim=plot.limits)
    for axes in panels:
        x = plot.ticks or ticks(axes.get_xlim(), "x" in plot.log, plot.kind)
        axes.set_xticks([*x.values()], [*map(_plain, x)])
        if plot.bars != "x":
            y = ticks(axes.get_ylim(), "y" in plot.log)
            axes.set_yticks([*y.values()], [*y])
        axes.minorticks_off()
    panels[-1].set_xlabel(below)
    _draw_legend(figure, plot, look)
    return figure


def _draw_line(axes: "Axes", line: Line, look: Styles, plot: Plot) -> None:
    own = look[line.label]
    x = np.where(line.x > 0, line.x, np.nan) if "x" in plot.log else line.x
    if plot.bars:
        middle = x if plot.bars == "x" else line.y
        ends = {f"{plot.bars}err": [middle - line.low, line.high - middle]}
        axes.errorbar(x, line.y, **ends, elinewidth=1.2, **own)
    else:
        band = {"color": own["color"], "alpha": 0.16, "linewidth": 0}
        axes.fill_between(x, line.low, line.high, **band)
        # Markers start at different places: lines that coincide stay distinguishable.
        every = max(1, len(x) // 8)
        first = [*look].index(line.label) * every // len(look)
        axes.plot(x, line.y, markevery=(first, every), **own)
    # Marks at the ends of an axis lie on the frame, which must not cut them off.
    free = {"color": own["color"], "markeredgewidth": 1, "clip_on": False}
    if gone := line.crosses:
        at_bottom = {"transform": axes.get_xaxis_transform(), "linestyle": "none"}
        y = 0.035 * [*look].index(line.label)  # above another's, which it would hide
        axes.plot(gone, [y] * len(gone), "x", markersize=7, **free, **at_bottom)
    if line.ring is not None:
        chosen = line.x == line.ring
        free |= {"markersize": 12, "markerfacecolor": "none"}
        axes.plot(line.x[chosen], line.y[chosen], "o", **free)


def _draw_legend(figure: "Figure", plot: Plot, look: Styles) -> None:
    """Draws a legend below the panels, and adds its height to the figure's."""
    from matplotlib.lines import Line2D

    labels = dict.fromkeys(x.label for x in plot.lines)
    shown = labels if plot.legend is None else plot.legend
    signs = {label: Line2D([], [], **look[label]) for label in shown}
    if plot.target is not None:
        signs[plot.target[1]] = Line2D([], [], **DOTTED)
    if not signs:
        return
    widest = max(map(len, signs)) * CHARACTER + SIGN
    texts = [_wrapped(text, WIDTH - 20 - SIGN) for text in signs]
    how = {"loc": "outside lower left", "ncols": max(1, int((WIDTH - 20) / widest))}
    legend = figure.legend([*signs.values()], texts, **how)
    # The layout would take the legend's room from the panels.
    room = legend.get_window_extent().height
    figure.set_figheight(figure.get_figheight() + room / 72)


def _plain(text: str) -> str:
    """Replaces control characters and line ends, for which no font has a glyph."""
    return "".join(c if c.isprintable() else " " for c in text)


def _wrapped(text: str, width: float) -> str:
    """Breaks text into lines of a width."""
    most = max(int(width / CHARACTER), 8)
    # A flag such as --outer-lr stays one word.
    return textwrap.fill(_plain(text), most, break_on_hyphens=False)


def ticks(ends: Ends, log: bool, kind: str = "plain") -> dict[str, float]:
    """Returns two or more round numbers of an axis, by their texts."""
    from matplotlib.ticker import MaxNLocator

    low, high = sorted(ends)
    found = _log_ticks(low, high, kind) if log else []
    if len(found) < 2:  # of a short logarithmic axis, too
        # A time is round in the unit of its text: 1.5 min, not 100 s.
        units = (length for bound, _, length in terminal.DURATIONS if high < bound)
        unit = next(units) if kind == "time" else 1
        locator = MaxNLocator(MOST, steps=[1, 2, 2.5, 5, 10])
        every = [float(x) * unit for x in locator.tick_values(low / unit, high / unit)]
        found = [x for x in every if low <= x <= high]
    return {WORDS[kind](x): x for x in found}


def _log_ticks(low: float, high: float, kind: str) -> list[float]:
    """Returns round numbers of a logarithmic axis, as many as it has room for."""
    bases, found = TIMES if kind == "time" else TENS, []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        every = [x * k for x, end in pairwise(bases) for k in steps if x * k < end]
        found = [x for x in every if low <= x <= high]
        if len(found) <= MOST:
            break
    return found[:: math.ceil(len(found) / MOST) or 1]


def _limits(
    lines: Sequence[Line], by: Measure, skip: float, most: float, wide: float
) -> tuple[Ends | None, str]:
    """Returns the ends of the y axis that show the differences, and "y" if logarithmic.

    Args:
        lines: the lines.
        by: their measure. A loss has no upper bound: values far above those of the
            best line may lie outside.
        skip: the share of each line, at its beginning, that may lie outside.
        most: the quantile of the best line that is not far above it.
        wide: the ratio of the ends from which the axis is logarithmic.
    """
    late = [np.stack(x[3:6])[:, int(skip * len(x.y)) :] for x in lines]
    late = [x for x in late if np.isfinite(x[0]).any()]
    if not late:
        return None, ""
    found = np.concatenate(late, axis=1)
    best, fence = float(np.nanmin(found[0])), math.inf
    if not by.higher_is_better:
        above = [float(np.nanquantile(x[0], most)) - best for x in late]
        fences = [best + 8 * max(x, abs(best) / 2) for x in above]
        fence = min((x for x in fences if x > 0), default=math.inf)
    found = found[:, found[0] <= fence]  # false for gaps, too
    positive = found[0][found[0] > 0]
    if len(positive) and positive.max() > wide * positive.min():
        return (float(positive.min() / 1.5), float(positive.max() * 1.5)), "y"
    low, high = _widened(np.minimum(found, fence))
    return (0.0 if best >= 0 and low < 0.2 * high else low, high), ""


def _widened(values: np.ndarray, log: bool = False) -> Ends:
    """Returns the smallest and the largest value, with room at each end."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if log:
        factor = (high / low) ** 0.05 if high > low else 1.5
        return low / factor, high * factor
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 0.5
    return low - margin, high + margin


def _titled(name: str, unit: str) -> str:
    return sentences.sentence(f"{name} ({unit})" if unit else name)


def _differences(report: Report) -> Iterator[Plot]:
    """Yields the differences from the baseline, around a line at 0."""
    by, lines, few = report.measure, [], []
    compared = [row for row in report.rows if row.comparison.difference]
    labels = [*dict.fromkeys(row.label for row in compared)]
    for row in compared:
        mean, low, high, deviation, *_ = row.comparison.difference or (0.0,) * 4
        if low is None or high is None:
            few.append(row)
            low, high = mean - (deviation or 0.0), mean + (deviation or 0.0)
        x, low, high = by.scale * np.array([[mean], [low], [high]])
        place = np.array([labels.index(row.label) + 0.7])
        lines.append(Line(row.label, row.point, x, place, low, high))

    def rows(axes: "Axes") -> None:
        axes.set_yticks([])
        # A label is above its bar: beside it, no room is left on a phone. The line at 0
        # is in pieces, because one line would cross the labels.
        for i, label in enumerate(labels):
            text = textwrap.shorten(_plain(label), 55, placeholder=" …")
            axes.text(0, i + 0.38, text, transform=axes.get_yaxis_transform())
            axes.plot([0, 0], [i + 0.47, i + 0.93], color=LIGHT["muted"], linewidth=1)

    below = ["bars: 95 % interval"] * (len(few) < len(lines))
    if report.terms != ONE_NOMINAL:
        below += ["better →" if by.higher_is_better else "← better"]
    note = "Too few seeds for an interval, so bars are one standard deviation of the "
    note += f"differences to each side: {', '.join(map(named, few))}."
    yield Plot(
        "differences",
        "answer",
        _titled(f"Difference from {report.baseline} in {by.name}", by.difference_unit),
        lines,
        "; ".join(below),
        limits=(len(labels), 0),
        bars="x",
        legend=(),
        height=40 * len(labels),
        note=note if few else "",
        more=rows,
    )


def _finals(rows: Sequence[Row], x: Sequence[float], by: Measure) -> Line:
    """Returns final means, with a standard deviation to either side."""
    found = [row.measure for row in rows if row.measure]
    y = by.scale * np.array([s.mean for s in found])
    around = by.scale * np.array([s.deviation or 0.0 for s in found])
    return Line(rows[0].label, "", np.array(x, float), y, y - around, y + around)


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Returns the names that none with as few bytes beats, fewest bytes first.

    Args:
        points: bytes and what they reached, by name; higher is better.
    """
    return [
        name
        for name, (sent, reached) in sorted(points.items(), key=lambda x: x[1])
        if all(y < reached or x > sent for x, y in points.values() if y != reached)
    ]


def _tradeoff(report: Report) -> Iterator[Plot]:
    """Yields the final measure by bytes sent, if three numbers of bytes differ."""
    by = report.measure
    rows = [r for r in report.rows if r.bytes_per_worker and r.measure]
    if report.sweep or len({row.bytes_per_worker for row in rows}) < 3:
        return
    lines = [_finals([row], [row.bytes_per_worker or 0.0], by) for row in rows]
    best = front({x.label: (float(x.x[0]), by.side * float(x.y[0])) for x in lines})
    is_crowded = len(lines) > MANY
    yield Plot(
        f"{by.key} at the end",
        "answer",
        f"{_titled(by.name, by.unit)} at the end, by most bytes sent by a worker",
        lines,
        f"{BYTES} (log)",
        "bytes",
        "x",
        bars="y",
        legend=best if is_crowded else None,
        note="Bars: one standard deviation to each side."
        + " Named: those that no other beats with as few bytes." * is_crowded,
    )


def quantities(report: Report) -> list[tuple[str, Measure]]:
    """Returns the metrics to draw over the runs, the study's measure first.

    Each has the group of its figures: measure, loss, replicas or more.
    """
    losses = LOSS, LOSS._replace(key="train_loss", name="training loss")
    chosen = [("measure", report.measure)]
    chosen += [("loss", loss) for loss in losses if loss != report.measure]
    chosen += [("replicas", by) for by in INSIDE]
    # A task's own figures, such as test_perplexity.
    others = {key for curve in report.curves for key in curve.bands}
    others -= {by.key for _, by in chosen}
    return chosen + [("more", named_measure(key)) for key in sorted(others)]


def is_empty(report: Report, by: Measure) -> bool:
    """Whether there is nothing to draw: the metric is 0 wherever it was measured."""
    bands = [c.bands[by.key] for c in report.curves if by.key in c.bands]
    return not any(x and math.isfinite(x) for band in bands for x in band.mean)


def _curves(report: Report) -> Iterator[Plot]:
    """Yields every metric by steps; the compared ones by bytes and time, too."""
    for group, by in quantities(report):
        if is_empty(report, by):
            continue
        yield _curve(report, group, by, STEPS)
        if group not in ("measure", "loss") or by.key == "train_loss":
            continue
        for view in (BYTES, *(network.name for network in report.networks)):
            yield _curve(report, group, by, view)


def _curve(report: Report, group: str, by: Measure, view: str) -> Plot:
    """Returns a metric by steps, by bytes, or by time on a network."""
    of_time = f"time {view}", "time", "modelled time", f"on {view}"
    slug, kind, x_label, how = VIEWS.get(view, of_time)
    # The ends of y are the same in all views: figures of a metric differ only in x.
    wide = 50.0 if group == "replicas" and not by.higher_is_better else math.inf
    limits, log = _limits(_lines(report, by, STEPS), by, 0.25, 1.0, wide)
    low, high = limits or (-math.inf, math.inf)
    lines = _lines(report, by, view)
    last = [float(line.x[-1]) for line in lines] or [0.0]
    # One algorithm may send tens of times as many bytes as another.
    is_log = kind == "bytes" or (kind == "time" and max(last) > 4 * min(last))
    # A logarithmic axis would spend decades on values outside the ends of y.
    seen = [x.x[(x.x > 0) & (low <= x.y) & (x.y <= high)] for x in lines]
    seen = np.concatenate([*seen, []])
    ends = {x[:2]: x.y[np.isfinite(x.y)][-1] for x in lines}
    curves = [curve for curve in report.curves if by.key in curve.bands]
    missing = [named(x) for x in curves if not low <= ends.get(x[:2], math.nan) <= high]
    note = f"Not in the picture, at least at the end: {', '.join(missing)}. "
    peak = max([0.0, *(float(np.nanmax(line.y)) for line in lines)])
    cut = f"The y axis is cut off: values go up to {number(float(f'{peak:.2g}'))}."
    cut *= group == "replicas" and peak > high
    goal = by.scale * (report.target or 0.0)
    has_goal = report.target and group == "measure" and low < goal < high
    return Plot(
        f"{by.key} by {slug}",
        group,
        f"{_titled(by.name, by.unit)} {how}",
        lines,
        x_label + " (log)" * is_log,
        kind,
        log + "x" * is_log,
        limits,
        _widened(seen, log=True) if is_log and len(seen) else None,
        target=(goal, f"target {sentences.target(report)}") if has_goal else None,
        note=(note * bool(missing) + cut).strip(),
    )


def _lines(report: Report, by: Measure, view: str) -> list[Line]:
    """Returns the curves that have a finite value and a positive x in a view."""
    lines = []
    for curve in report.curves:
        views = {STEPS: curve.steps, BYTES: curve.bytes_per_worker, **curve.seconds}
        band, x = curve.bands.get(by.key), np.array(views.get(view) or [0.0], float)
        if band is None or x.max() <= 0:
            continue
        parts = by.scale * np.array(band, float)
        mean, low, high = np.where(np.isfinite(parts), parts, np.nan)
        if np.isfinite(mean).any():
            lines.append(Line(curve.label, curve.point, x, mean, low, high))
    return lines


def _places(report: Report) -> dict[str, float]:
    """Returns the x of each point of the sweep, evenly spaced for words and factors."""
    points = [p for p in dict.fromkeys(row.point for row in report.rows) if p]
    try:
        at = {point: float(point.partition("=")[2]) for point in points}
    except ValueError:
        return {point: float(i) for i, point in enumerate(points)}
    # Workers, periods and rates usually grow by factors.
    if at and min(at.values()) > 0 and max(at.values()) >= 4 * min(at.values()):
        at = {point: math.log(x) for point, x in at.items()}
    return at


def _swept(report: Report, name: str, title: str, lines: Sequence[Line]) -> Plot:
    """Returns a figure over the swept values, with its lines side by side."""
    at = _places(report)
    # Bars at one value would cover each other.
    step = 0.02 * (max(at.values()) - min(at.values())) if at else 0.0
    shifts = [step * (i - (len(lines) - 1) / 2) for i in range(len(lines))]
    return Plot(
        name,
        "sweep",
        title,
        [x._replace(x=x.x + by) for x, by in zip(lines, shifts, strict=True)],
        report.sweep,
        ticks={point.partition("=")[2]: x for point, x in at.items()},
        bars="y",
    )


def _sweep(report: Report) -> Iterator[Plot]:
    """Yields the final measure against the swept value."""
    at, by, lines = _places(report), report.measure, []
    rows = [row for row in report.rows if row.measure]
    for own in grouped(rows if at else [], lambda row: row.label).values():
        if not own[0].point:  # without the flag it is the same everywhere
            own = [own[0]._replace(point=point) for point in at]
        lines.append(_finals(own, [at[row.point] for row in own], by))
    gone = [named(row) for row in report.rows if row not in rows]
    title = f"{_titled(by.name, by.unit)} by {report.sweep}"
    plot = _swept(report, f"{by.key} by {report.sweep}", title, lines)
    yield plot._replace(note=f"All runs diverged: {', '.join(gone)}." if gone else "")


def _tuning(report: Report) -> Iterator[Plot]:
    """Yields the trials of each tuned flag, and its best value over a sweep."""
    at = _places(report)
    for flag, tried in grouped(report.tuning, lambda t: t.flag).items():
        swept = [t for t in tried if t.point in at]
        lines = [_best(own, at) for own in grouped(swept, lambda t: t.label).values()]
        title = f"Best {flag} by {report.sweep}"
        bars = "Bars: 95 % intervals, from resampling the seeds of the trials."
        values = [x for t in tried for x in t.values]
        is_wide = min(values) > 0 and max(values) >= 4 * min(values)
        yield _swept(report, title.lower(), title, lines)._replace(
            log="y" * is_wide,
            limits=_widened(np.array(values), is_wide),
            note=bars * any(t.low is not None for t in tried),
        )
        yield _trials(flag, tried, report.measure)


def _best(own: Sequence[Tuning], at: Mapping[str, float]) -> Line:
    """Returns the best values of a variant over a sweep, with their intervals."""
    x, y = np.array([(at[t.point], t.chosen) for t in own]).T
    # The interval of the resamples may be unknown, or leave out the value.
    low, high = np.array([(t.low, t.high) for t in own], float).T
    return Line(own[0].label, "", x, y, np.fmin(low, y), np.fmax(high, y))


def _trials(flag: str, tried: Sequence[Tuning], by: Measure) -> Plot:
    """Returns validation scores against the values of a flag that were tried."""
    lines = []
    for t in tried:
        x, y = np.array(t.values, float), np.array(t.scores, float) * by.scale
        y = np.where(np.isfinite(y), y, np.nan)
        gone = x[np.isnan(y)].tolist()
        lines.append(Line(t.label, t.point, x, y, y, y, t.chosen, gone))
    values = [x for t in tried for x in t.values]
    is_log = min(values) > 0 and ("lr" in flag or max(values) > 10 * min(values))
    limits, log = _limits(lines, by, 0.0, 0.5, 1000.0)
    if limits and by.higher_is_better:
        # Far below, as at rates that are too high, trials would hide the differences.
        best = [float(np.nanmax(line.y, initial=limits[0])) for line in lines]
        wide = max(2 * (max(best) - min(best)), 0.05 * max(best))
        limits = max(limits[0], min(best) - wide), limits[1]
    name = _titled(by.name.removeprefix("test "), by.unit)
    edges = [f"{named(t)} ({number(t.chosen)})" for t in tried if t.at_edge]
    notes = [f"Best at the edge of the range: {', '.join(edges)}."] if edges else []
    least = min(float(np.nanmin(line.y, initial=math.inf)) for line in lines)
    cut = f"The y axis is cut off: values go down to {number(float(f'{least:.2g}'))}."
    notes += [cut] * (limits is not None and least < limits[0])
    notes += ["× at the bottom: a run diverged."] * any(x.crosses for x in lines)
    return Plot(
        f"tuning {flag}",
        "tuning",
        f"{name} on validation data by {flag}",
        lines,
        f"{flag}{' (log)' * is_log}; ring: chosen",
        log=log + "x" * is_log,
        limits=limits,
        note=" ".join(notes),
    )
