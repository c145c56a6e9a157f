"""Kale et al. 2025, algorithm 3: the own outer gradient now, the others' a round late.

A worker's outer step is along the mean of its own outer gradient of this round and the
others' of the round before, none of which have come in the first.
"""

import numpy as np

from recurrences import PERIOD, START, local_steps, mean

SETTINGS = [{"period": 3, "outer_lr": 0.7, "outer_momentum": 0.5}, {"period": PERIOD}]


def recurrence(workers, period, outer_lr=0.4, outer_momentum=0.4):
    anchors = [START] * workers
    velocity = [np.zeros_like(START)] * workers
    late = [np.zeros_like(START)] * workers
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            fresh = [anchors[i] - theta[i] for i in range(workers)]
            for i in range(workers):
                g = mean([fresh[j] if j == i else late[j] for j in range(workers)])
                velocity[i] = outer_momentum * velocity[i] + g
                look_ahead = g + outer_momentum * velocity[i]
                anchors[i] = anchors[i] - outer_lr * look_ahead
            late = fresh
            theta[:] = anchors
        yield mean(anchors), theta
