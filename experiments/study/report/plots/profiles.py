"""The figure of performance profiles: how often an algorithm is near the fastest."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from experiments.study.analysis.formatting import number
from experiments.study.analysis.profiles import MOST, Profile, profiles, times_of
from experiments.study.analysis.results import Report
from experiments.study.report.charts import Chart, Line, Plot, Range, draw_chart
from experiments.study.report.styles import Styles

FAR = 32.0  # the end of the axis: so many times as long as the fastest
SHOWN = 12  # the most lines that can be distinguished in one figure


def plots(report: Report, styles: Styles) -> Iterator[Plot]:
    """Yields the profiles over the networks and the values of the sweep."""
    times = times_of(report.rows)
    found = profiles(times)
    # On a single workload a profile is a list of times, which the table has.
    if len(found) > 1 and len(found[0].ratios) > 1:
        yield plot(found, styles, ", ".join(times))


def plot(found: Sequence[Profile], styles: Styles, workloads: str) -> Plot:
    """Returns the figure of profiles.

    Args:
        found: profiles, best first.
        styles: styles by label.
        workloads: the names of the workloads.
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
        f"Performance profiles, as in AlgoPerf, over {count} workloads: {workloads}. "
        f"In brackets: the score, the mean share from 1 to {MOST:g} times.{kept}",
        partial(draw_chart, chart),
    )


def line_of(profile: Profile) -> Line:
    """Returns a line with a step at each workload, across the whole axis."""
    ends = [x for x in dict.fromkeys(profile.ratios) if x <= FAR]
    at = [*dict.fromkeys([1.0, *ends, FAR])]
    # Each step is vertical: every position occurs with both of its shares.
    x, shares = np.repeat(at, 2)[1:], [profile.share(place) for place in at]
    y, every = np.repeat(shares, 2)[:-1], max(1, len(x) // 4)
    tips = [
        f"{profile.label}: {profile.share(place):.0%} within {number(place)} times the "
        "fastest"
        for place in x.tolist()
    ]
    return Line(profile.label, "", x, y, y, y, tips, every)
