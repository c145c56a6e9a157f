"""The figure of performance profiles: how often an algorithm is near the fastest."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from experiments.study.analysis.formatting import number
from experiments.study.analysis.profiles import MOST, Profile, profiles, times_of
from experiments.study.analysis.results import Report
from experiments.study.report.charts import Chart, Line, Plot, Range, draw_chart
from experiments.study.report.styles import Styles

FAR = 32.0  # times as long as the fastest: the end of the axis
SHOWN = 12  # lines of one figure that can be told apart


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """The profiles over the networks and the points of the sweep."""
    times = times_of(report.rows)
    found = profiles(times)
    # On a single workload a profile is a list of times, which the table has.
    if len(found) > 1 and len(found[0].ratios) > 1:
        yield plot(found, styles, ", ".join(times))


def plot(found: Sequence[Profile], styles: Styles, workloads: str) -> Plot:
    """One figure of profiles.

    Args:
        found: profiles, best first.
        styles: by label.
        workloads: their names.
    """
    count = len(found[0].ratios)
    title = "Share of workloads by time to the target over the fastest's"
    shown = found[:SHOWN]
    chart = Chart(
        title,
        "times as long as the fastest (log)",
        Range(1.0, FAR, log=True),
        Range(0.0, 1.0).widened(0.03),
        [line_of(each) for each in shown],
        styles,
        {each.label: f"{each.label} ({each.score:.2f})" for each in shown},
    )
    scores = "; ".join(f"{each.label} {each.score:.2f}" for each in found)
    kept = f" The {SHOWN} best of {len(found)} are drawn." * (len(found) > SHOWN)
    return Plot(
        "profiles",
        "time",
        title,
        f"{title}. Scores: {scores}.",
        f"Performance profiles, as AlgoPerf draws them, over {count} workloads: "
        f"{workloads}. In brackets: the mean share from 1 to {MOST:g} times.{kept}",
        partial(draw_chart, chart),
    )


def line_of(profile: Profile) -> Line:
    """A line with a step at each workload, across the whole axis."""
    ends = [x for x in dict.fromkeys(profile.ratios) if x <= FAR]
    x, y, tips = [], [], []
    before = 0.0
    for at in dict.fromkeys([1.0, *ends, FAR]):
        share = profile.share(at)
        text = f"{profile.label}: {share:.0%} within {number(at)} times the fastest"
        x += [at, at]
        y += [before, share]
        tips += [text, text]
        before = share
    xs, ys = np.array(x[1:]), np.array(y[1:])
    return Line(profile.label, "", xs, ys, ys, ys, tips[1:], max(1, len(xs) // 4))
