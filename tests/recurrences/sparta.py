"""Baioumy and Cheema 2025: random entries of the models are averaged."""

from math import ceil

import jax
import numpy as np

from recurrences import PERIOD, START, by_leaf, draw_key, local_steps, mean

SETTINGS = [
    {"density": 0.3, "seed": 5},
    {},
    {"density": 0.3, "period": PERIOD},
    {"density": 1.0, "period": PERIOD},
]
DRAWS = ("an entry is averaged if it is of a leaf's largest", ["step"])


def recurrence(workers, density=0.005, period=1, seed=0):
    def chosen(number, draws):
        """As many entries of a leaf as the density says: those of the largest draws."""
        return draws >= np.sort(draws, axis=None)[-ceil(density * draws.size)]

    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            draws = jax.random.uniform(draw_key(seed, step), START.shape)
            entries = by_leaf(chosen, np.asarray(draws))
            average = mean(theta)
            theta[:] = [np.where(entries, average, x) for x in theta]
        yield mean(theta), theta
