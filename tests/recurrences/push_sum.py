"""Assran 2019, algorithm 1, of any column-stochastic weights."""

import jax
import numpy as np

from recurrences import START, draw_key, local_steps, mean
from recurrences.graphs import COLUMNS, matrix

SETTINGS = [
    {"topology": COLUMNS, "drop": 0.4},
    {},
    {"drop": 0.4},
    {"drop": 0.7, "seed": 5},
    {"topology": "ring"},
    {"topology": COLUMNS},
    {"topology": "ring", "drop": 0.4},
    {"topology": "star", "drop": 0.4},
]
DRAWS = ("this worker fails to send if it is below drop", ["step", "worker"])


def recurrence(workers, drop=0.0, topology="exponential", seed=0):
    x = [START] * workers
    w = np.ones(workers)
    z = [START] * workers
    for step, theta in local_steps(workers):
        shares = np.array(matrix(topology, step, workers))
        for i in range(workers):
            if jax.random.uniform(draw_key(seed, step, i)) < drop:
                shares[:, i] = np.eye(workers)[i]  # it fails, and keeps all
        x = shares @ [x[i] + theta[i] - z[i] for i in range(workers)]
        w = shares @ w
        z = [x[i] / w[i] for i in range(workers)]
        theta[:] = z
        yield mean(x), theta
