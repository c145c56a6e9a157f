"""Nedić 2017, DIGing: y ← W y + g - (g before), x ← W x + u along y, on a ring."""

import numpy as np

from recurrences import START, local_steps, mean
from recurrences.gossip import ring_mean

SETTINGS = [{}]


def recurrence(workers):
    tracked = [np.zeros_like(START)] * workers
    before, old = list(tracked), [START] * workers

    def tracking(grads, theta, step):
        mixed = [ring_mean(tracked, i) for i in range(workers)]
        tracked[:] = [mixed[i] + grads[i] - before[i] for i in range(workers)]
        before[:] = grads
        return tracked

    for _, theta in local_steps(workers, combine=tracking):
        new = list(theta)
        for i in range(workers):
            theta[i] = ring_mean(old, i) + (new[i] - old[i])
        old = list(theta)
        yield mean(theta), theta
