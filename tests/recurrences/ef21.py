"""Fatkhullin 2023, algorithm 1, EF21-SGDM, from momenta and estimates of 0."""

import numpy as np

from recurrences import START, in_step, mean
from recurrences.topk_sgd import top_k

SETTINGS = [
    {"density": 0.3, "local_momentum": 0.6},
    {},
    {"density": 0.3, "local_momentum": 0.0},
    {"density": 1.0},
]


def recurrence(workers, density=0.05, local_momentum=0.9):
    eta = 1 - local_momentum
    v = np.zeros((workers, START.size))  # each worker's momentum
    g = np.zeros((workers, START.size))  # what the server knows of it

    def combine(grads, theta, step):
        for i in range(workers):
            v[i] = (1 - eta) * v[i] + eta * grads[i]
            g[i] = g[i] + top_k(v[i] - g[i], density)
        return [mean(g)] * workers

    return in_step(workers, combine)
