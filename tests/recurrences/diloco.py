"""Douillard 2023, algorithm 1: outer Nesterov momentum as in Sutskever 2013."""

import numpy as np

from recurrences import PERIOD, START, local_steps, mean

SETTINGS = [
    {"period": PERIOD, "outer_lr": 0.4, "outer_momentum": 0.5},
    {"period": PERIOD},
]


def recurrence(workers, period, outer_lr=0.7, outer_momentum=0.9):
    anchor = START
    velocity = np.zeros_like(START)
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            pseudo_gradient = anchor - mean(theta)
            velocity = outer_momentum * velocity + pseudo_gradient
            look_ahead = pseudo_gradient + outer_momentum * velocity
            anchor = anchor - outer_lr * look_ahead
            theta[:] = [anchor] * workers
        yield anchor, theta
