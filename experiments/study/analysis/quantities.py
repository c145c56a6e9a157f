"""Which metrics of a study are drawn, and against what."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.study.analysis.results import Curve, Report


class Quantity(NamedTuple):
    """A metric that is drawn over the runs.

    Attributes:
        key: in the curves' bands.
        name: in words.
        scale: what a figure is multiplied by to be shown.
        unit: of what is shown.
        group: as a Drawing's.
        bounded: no run can leave the picture, as an accuracy cannot.
        log: whether its axis may be logarithmic.
    """

    key: str
    name: str
    scale: float
    unit: str
    group: str
    bounded: bool = False
    log: bool = False


class View(NamedTuple):
    """What a metric is drawn against.

    Attributes:
        slug: for the name of a file.
        name: in words.
        title: what it adds to a title, such as "on 10 GbE".
        kind: of its labels: plain, bytes or time.
        values: at a curve's evaluations; None where they are not known.
        folded: shown only when it is asked for.
    """

    slug: str
    name: str
    title: str
    kind: str
    values: Callable[[Curve], Sequence[float] | None]
    folded: bool = False


INSIDE = (
    Quantity(
        "drift", "spread of the replicas before a sync", 1, "", "replicas", log=True
    ),
    Quantity("divergence", "spread of the replicas", 1, "", "replicas", log=True),
    Quantity(
        "pseudo_gradient", "norm of the pseudo-gradient", 1, "", "replicas", log=True
    ),
    Quantity(
        "displacement_cosine",
        "mean cosine between the workers' displacements",
        1,
        "",
        "replicas",
        bounded=True,
    ),
)


def quantities(report: Report) -> list[Quantity]:
    """What there is to draw over the runs, the study's measure first."""
    measure = report.measure
    first = Quantity(
        measure.key,
        measure.name,
        measure.scale,
        measure.unit,
        "measure",
        bounded=measure.higher_is_better,
    )
    losses = [Quantity("test_loss", "test loss", 1, "", "loss")]
    losses += [Quantity("train_loss", "training loss", 1, "", "loss")]
    chosen = [first, *(x for x in losses if x.key != measure.key), *INSIDE]
    others = {key for curve in report.curves for key in curve.bands}
    others -= {x.key for x in chosen} | {"bytes_per_worker", "seconds"}
    for key in sorted(others):
        part = key == "test_accuracy"
        scale, unit = (100.0, "%") if part else (1.0, "")
        name = key.replace("_", " ")
        chosen.append(Quantity(key, name, scale, unit, "more", bounded=part))
    return chosen


def is_empty(report: Report, quantity: Quantity) -> bool:
    """Whether there is nothing to see: it is 0 wherever it was measured."""
    having = (c.bands[quantity.key] for c in report.curves if quantity.key in c.bands)
    return not any(x and math.isfinite(x) for band in having for x in band.mean)


def views_of(report: Report) -> list[View]:
    """Steps, bytes, and the time on each network: unfolded that on the slowest one.

    That is where it costs most what is sent.
    """
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
    return [
        View("steps", "local steps", "by steps", "plain", lambda c: c.steps),
        View("bytes", "bytes sent by each worker", "by bytes sent", "bytes", sent),
        *times,
    ]


def sent(curve: Curve) -> list[float] | None:
    """Bytes that each worker sent."""
    return curve.bytes_per_worker
