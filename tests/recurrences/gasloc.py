"""Cagnasso 2026: θ ← y - α Λ y + γ (y - y before) of y = θ + η g, for Λ = I - W."""

import numpy as np

from recurrences import PERIOD, START, local_steps, mean
from recurrences.graphs import EDGES, WEIGHTS, mixed

SETTINGS = [
    {"period": 3, "topology": WEIGHTS, "consensus": 0.6},
    {"period": PERIOD},
    {"period": PERIOD, "topology": "complete", "outer_lr": 1.0},
    {"period": 2, "outer_momentum": 0.0},
    {"period": 2, "topology": np.stack([WEIGHTS, WEIGHTS @ WEIGHTS])},
    {"period": 3, "topology": "star"},
    {"period": PERIOD, "topology": EDGES, "outer_momentum": 0.4},
]


def recurrence(
    workers, period, outer_lr=0.7, outer_momentum=0.9, consensus=1.0, topology="ring"
):
    slow = [START] * workers
    old_ahead = [START] * workers
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            ahead = [x + outer_lr * (y - x) for x, y in zip(slow, theta, strict=True)]
            around = mixed(ahead, topology, step // period)
            slow = [
                y - consensus * (y - w) + outer_momentum * (y - old)
                for y, w, old in zip(ahead, around, old_ahead, strict=True)
            ]
            old_ahead = ahead
            theta[:] = slow
        yield mean(slow), theta
