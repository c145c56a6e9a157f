"""Nedić 2017, DIGing: y ← W y + g - (g before), x ← W x + u along y."""

import numpy as np

from recurrences import START, local_steps, mean
from recurrences.graphs import CHANGING, EDGES, mixed

SETTINGS = [
    {"topology": CHANGING},
    {},
    {"topology": "exponential"},
    {"topology": "star"},
    {"topology": EDGES},
]


def recurrence(workers, topology="ring"):
    tracked = [np.zeros_like(START)] * workers
    old_grads = list(tracked)
    old = [START] * workers

    # c is mixed in the step that made it: with W of that step, W y + g - g before.
    def tracking(grads, theta, step):
        around = mixed(tracked, topology, step - 1)
        tracked[:] = [around[i] + grads[i] - old_grads[i] for i in range(workers)]
        old_grads[:] = grads
        return tracked

    for step, theta in local_steps(workers, combine=tracking):
        new = list(theta)
        around = mixed(old, topology, step)
        for i in range(workers):
            theta[i] = around[i] + (new[i] - old[i])
        old = list(theta)
        yield mean(theta), theta
