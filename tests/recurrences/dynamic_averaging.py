"""Kamp et al. 2018, their local conditions; where one is broken all are averaged."""

import numpy as np

from recurrences import PERIOD, START, local_steps, mean

# The bounds lie between the distances that this problem's workers go.
SETTINGS = [
    {"period": 2, "bound": 0.1},
    {"period": PERIOD, "bound": 1e-3},
    {"period": 1, "bound": 0.15},
]


def recurrence(workers, period, bound):
    reference = START
    for step, theta in local_steps(workers):
        distances = [np.sum((x - reference) ** 2) for x in theta]
        if (step + 1) % period == 0 and max(distances) > bound:
            reference = mean(theta)
            theta[:] = [reference] * workers
        yield mean(theta), theta
