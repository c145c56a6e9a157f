"""Bernstein 2019, algorithm 1: momentum on each worker, then a majority vote."""

import numpy as np

from recurrences import PART_DRAWS, START, in_step
from recurrences.sign_sgd import DRAWN, NO_TIES, voted

SETTINGS = [({"local_momentum": 0.6, "seed": 3}, DRAWN), ({}, NO_TIES)]
DRAWS = (f"0 has sign + if it is below a half, {PART_DRAWS}", ["step", "worker"])


def recurrence(workers, local_momentum=0.9, seed=0, zeros_drawn=False):
    m = np.zeros((workers, START.size))

    def combine(grads, theta, step):
        m[:] = local_momentum * m + (1 - local_momentum) * np.array(grads)
        return [voted(m, step, seed, zeros_drawn)] * workers

    return in_step(workers, combine)
