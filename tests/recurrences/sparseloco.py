"""Sarfi 2025, algorithm 1: the largest entries of outer gradients, decayed feedback.

Bins and their table as in the authors' code, from one tensor's chosen values.
"""

from math import ceil

import numpy as np

from recurrences import PERIOD, START, by_leaf, local_steps, mean
from recurrences.topk_sgd import largest

SETTINGS = [
    {"period": PERIOD, "density": 0.4, "chunk": 5, "decay": 0.8, "outer_lr": 0.7},
    {"period": PERIOD},
    {"period": PERIOD, "density": 0.3, "decay": 0.8, "outer_lr": 0.7, "bits": None},
    {"period": PERIOD, "density": 0.5},
    {"period": PERIOD, "density": 1.0, "decay": 1.0, "outer_lr": 1.3, "bits": 8},
]


def in_bins(x, bits):
    """Each entry's mean of the entries in its bin."""
    if bits is None or x.size <= 2**bits:
        return x
    bins = 2**bits
    centred = x - x.mean()
    width = 6 * x.std(ddof=1) / bins
    number = np.clip(np.round(centred / width + bins / 2), 0, bins - 1)
    return np.array([centred[number == n].mean() for n in number]) + x.mean()


def recurrence(
    workers, period, density=1 / 64, decay=0.95, outer_lr=1.0, bits=2, chunk=4096
):
    anchor = START
    residual = [np.zeros_like(START)] * workers

    def select(number, x):
        flat = x.ravel()
        d = np.zeros(x.size)
        chosen = []
        # The fewest equal chunks of at most that length.
        for places in np.split(np.arange(x.size), ceil(x.size / chunk)):
            chosen.append(places[largest(flat[places], ceil(density * len(places)))])
        chosen = np.concatenate(chosen)
        d[chosen] = in_bins(flat[chosen], bits)
        return d

    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            e = [decay * residual[i] + anchor - theta[i] for i in range(workers)]
            d = [by_leaf(select, e[i]) for i in range(workers)]
            residual = [e[i] - d[i] for i in range(workers)]
            anchor = anchor - outer_lr * mean(d)
            theta[:] = [anchor] * workers
        yield anchor, theta
