"""Wang, Liang and Joshi 2020: models are pulled to an anchor sent a round ago."""

import numpy as np

from recurrences import PERIOD, START, local_steps, mean

SETTINGS = [
    {"period": PERIOD},
    {"period": 2, "pull": 0.2, "anchor_momentum": 0.0},
    {"period": 3, "pull": 1.0, "anchor_momentum": 0.5},
]


def recurrence(workers, period, pull=0.6, anchor_momentum=0.7):
    z = START
    v = np.zeros_like(START)
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            theta[:] = [x - pull * (x - z) for x in theta]
            v = anchor_momentum * v + mean(theta) - z
            z = z + v  # launched now, used at the next sync
        yield mean(theta), theta
