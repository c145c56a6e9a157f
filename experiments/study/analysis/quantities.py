"""The metrics of a study that are drawn over its runs."""

import math
from typing import NamedTuple

from experiments.study.analysis.results import Report
from experiments.study.statistics import LOSS, Measure, named_measure


class Quantity(NamedTuple):
    """A metric that is drawn over the runs.

    Attributes:
        by: its key in the curves' bands and its name in words. If higher is better, it
            is bounded like an accuracy: no run can leave the axes.
        group: the group of its figures: measure, loss, replicas or more.
        log: whether its axis may be logarithmic.
    """

    by: Measure
    group: str = "replicas"
    log: bool = False


COSINE = "mean cosine between the workers' displacements"
SPREAD = "standard deviation of the workers' training losses"
INSIDE = (
    Quantity(Measure("worker_loss_spread", SPREAD, False), log=True),
    Quantity(Measure("drift", "spread of the replicas before a sync", False), log=True),
    Quantity(Measure("divergence", "spread of the replicas", False), log=True),
    Quantity(
        Measure("pseudo_gradient", "norm of the pseudo-gradient", False), log=True
    ),
    Quantity(Measure("displacement_cosine", COSINE, True)),
)


def quantities(report: Report) -> list[Quantity]:
    """Returns the metrics to draw over the runs, the study's measure first."""
    losses = (LOSS, LOSS._replace(key="train_loss", name="training loss"))
    chosen = [Quantity(report.measure, "measure")]
    chosen += [Quantity(loss, "loss") for loss in losses if loss != report.measure]
    chosen += INSIDE
    # A task's own figures, such as test_perplexity.
    others = {key for curve in report.curves for key in curve.bands}
    others -= {x.by.key for x in chosen} | {"bytes_per_worker", "seconds"}
    return chosen + [Quantity(named_measure(key), "more") for key in sorted(others)]


def is_empty(report: Report, quantity: Quantity) -> bool:
    """Whether there is nothing to draw: the metric is 0 wherever it was measured."""
    bands = [
        c.bands[quantity.by.key] for c in report.curves if quantity.by.key in c.bands
    ]
    return not any(x and math.isfinite(x) for band in bands for x in band.mean)
