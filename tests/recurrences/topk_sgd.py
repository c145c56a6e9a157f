"""Stich 2018, algorithm 2: the largest entries, with memory."""

from math import ceil

import numpy as np

from recurrences import START, by_leaf, in_step, mean

SETTINGS = [{"density": 0.3}, {}, {"density": 1.0}]
SETTINGS += [{"density": 0.3, "feedback": False}]


def largest(x, count):
    """The places of the entries of largest magnitude, the largest first."""
    return np.argsort(-np.abs(x), axis=None, kind="stable")[:count]


def top_k(vector, density):
    """The vector with all but the largest entries of each leaf at zero."""

    def of_leaf(number, x):
        chosen = largest(x, ceil(density * x.size))
        d = np.zeros(x.size)
        d[chosen] = x.ravel()[chosen]
        return d

    return by_leaf(of_leaf, vector)


def recurrence(workers, density=0.01, feedback=True):
    residual = [np.zeros_like(START)] * workers

    def combine(grads, theta, step):
        x = [grads[i] + residual[i] for i in range(workers)]
        d = [top_k(vector, density) for vector in x]
        if feedback:
            residual[:] = [x[i] - d[i] for i in range(workers)]
        return [mean(d)] * workers

    return in_step(workers, combine)
