"""The metrics of a study that are drawn, and the x axes of their figures."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.study.analysis.results import Curve, Report
from experiments.study.statistics import LOSS, Measure, named_measure


class Quantity(NamedTuple):
    """A metric that is drawn over the runs.

    Attributes:
        key: key in the curves' bands.
        name: name in words.
        scale: factor of a value when shown.
        unit: unit of a value when shown.
        group: group of its figures: measure, loss, replicas or more.
        bounded: whether no run can leave the axes, as for an accuracy.
        log: whether its axis may be logarithmic.
    """

    key: str
    name: str
    scale: float = 1
    unit: str = ""
    group: str = "replicas"
    bounded: bool = False
    log: bool = False


class View(NamedTuple):
    """The x axis that a metric is drawn against.

    Attributes:
        slug: part of the file's name.
        name: name in words.
        title: addition to a title, such as "on 10 GbE".
        kind: kind of its tick labels: plain, bytes or time.
        values: returns the values at a curve's evaluations; None if they are not known.
        folded: whether it is shown only on demand.
    """

    slug: str
    name: str
    title: str
    kind: str
    values: Callable[[Curve], Sequence[float] | None]
    folded: bool = False


INSIDE = (
    Quantity("drift", "spread of the replicas before a sync", log=True),
    Quantity("divergence", "spread of the replicas", log=True),
    Quantity("pseudo_gradient", "norm of the pseudo-gradient", log=True),
    Quantity(
        "displacement_cosine",
        "mean cosine between the workers' displacements",
        bounded=True,
    ),
)


def quantities(report: Report) -> list[Quantity]:
    """Returns the metrics to draw over the runs, the study's measure first."""
    by = report.measure
    chosen = [_quantity(by, "measure")]
    losses = (LOSS, LOSS._replace(key="train_loss", name="training loss"))
    chosen += [_quantity(loss, "loss") for loss in losses if loss.key != by.key]
    chosen += INSIDE
    # A task's own figures, such as test_perplexity.
    others = {key for curve in report.curves for key in curve.bands}
    others -= {x.key for x in chosen} | {"bytes_per_worker", "seconds"}
    return chosen + [_quantity(named_measure(key), "more") for key in sorted(others)]


def _quantity(by: Measure, group: str) -> Quantity:
    """Returns a measure as a metric of a group."""
    return Quantity(by.key, by.name, by.scale, by.unit, group, by.higher_is_better)


def is_empty(report: Report, quantity: Quantity) -> bool:
    """Whether there is nothing to see: it is 0 wherever it was measured."""
    having = (c.bands[quantity.key] for c in report.curves if quantity.key in c.bands)
    return not any(x and math.isfinite(x) for band in having for x in band.mean)


def views_of(report: Report) -> list[View]:
    """Returns steps, bytes, and the time on each network.

    Only the slowest network is unfolded: there the bytes cost most.
    """
    # The last value of a curve is that of the whole run.
    most = {
        n: max((c.seconds.get(n.name, [0.0])[-1] for c in report.curves), default=0)
        for n in report.networks
    }
    slowest = max(most, key=lambda n: most[n], default=None)
    times = [
        View(
            f"time {n.name}",
            "modelled time",
            f"on {n.name}",
            "time",
            lambda curve, name=n.name: curve.seconds.get(name),
            folded=n is not slowest,
        )
        for n in report.networks
    ]
    bytes_name = "bytes sent by each worker"
    return [
        View("steps", "local steps", "by steps", "plain", lambda c: c.steps),
        View(
            "bytes", bytes_name, "by bytes sent", "bytes", lambda c: c.bytes_per_worker
        ),
        *times,
    ]
