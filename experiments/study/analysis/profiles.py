"""Performance profiles: how often an algorithm is near the fastest to the target.

A workload is a setting in which all algorithms are timed: a study's data on one
network, at one value of the sweep.

Source: Dolan and Moré, "Benchmarking optimization software with performance profiles",
2002; Dahl et al., "Benchmarking neural network training algorithms", 2023 (AlgoPerf).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.study.analysis.comparison import by_point
from experiments.study.analysis.results import Row

# The largest ratio to the fastest time that counts for a score, as in AlgoPerf.
MOST = 4.0

# Times to the target by label, by workload; None where it is never reached.
Times = Mapping[str, Mapping[str, float | None]]


class Profile(NamedTuple):
    """One algorithm's times over the workloads.

    Attributes:
        label: label of the algorithm.
        ratios: its time divided by the fastest time of each workload, in ascending
            order; inf where it never reaches the target.
        score: the mean, over x from 1 to `MOST`, of the share of workloads where it
            takes at most x times as long as the fastest; 1 is best.
    """

    label: str
    ratios: Sequence[float]
    score: float

    def share(self, most: float) -> float:
        """The share of workloads where it takes at most `most` times as long."""
        return sum(ratio <= most for ratio in self.ratios) / len(self.ratios)


def profiles(times: Times) -> list[Profile]:
    """Returns the profiles, best score first; none without a workload.

    Workloads on which no algorithm reaches the target do not count. An algorithm that
    was not timed on a workload has not reached its target.
    """
    reached = []
    for own in times.values():
        known = {label: t for label, t in own.items() if t is not None}
        fastest = min(known.values(), default=0.0)
        # All algorithms that take no time count as the fastest.
        reached.append({x: t / fastest if fastest else 1.0 for x, t in known.items()})
    reached = [own for own in reached if own]
    labels = dict.fromkeys(label for own in times.values() for label in own)
    found = []
    for label in labels if reached else ():
        ratios = sorted(own.get(label, math.inf) for own in reached)
        # The share is a step function: each workload adds the area right of its ratio.
        areas = [max(MOST - ratio, 0.0) / (MOST - 1) for ratio in ratios]
        found.append(Profile(label, ratios, float(np.mean(areas))))
    return sorted(found, key=lambda profile: -profile.score)


def times_of(rows: Sequence[Row]) -> Times:
    """Returns the modelled times to the target of a study, network by network."""
    return {
        " at ".join(x for x in (network, point) if x): {
            row.label: row.to_target[network] for row in own if row.to_target
        }
        for point, own in by_point(rows).items()
        for network in dict.fromkeys(n for row in own for n in row.to_target)
    }
