"""Lin 2021, algorithm 1 (QG-DSGDm), and with Nesterov's look-ahead (QG-DSGDm-N)."""

import numpy as np

from recurrences import LR, START, falling, local_steps, mean, rate
from recurrences.graphs import CHANGING, EDGES, mixed

SETTINGS = [
    {
        "learning_rate": falling,
        "topology": CHANGING,
        "local_momentum": 0.5,
        "decay": 0.3,
    },
    {"learning_rate": LR},
    {"learning_rate": falling, "topology": "exponential"},
    {"learning_rate": LR, "local_momentum": 0.5, "nesterov": False},
    {"learning_rate": falling, "topology": EDGES, "nesterov": False},
]


def recurrence(
    workers,
    learning_rate,
    local_momentum=0.9,
    decay=0.9,
    nesterov=True,
    topology="ring",
):
    estimate = [np.zeros_like(START)] * workers
    old = [START] * workers

    def directions(grads, theta, step):
        steps = []
        for g, m in zip(grads, estimate, strict=True):
            heavy = local_momentum * m + g
            steps.append(g + local_momentum * heavy if nesterov else heavy)
        return steps

    for step, theta in local_steps(workers, learning_rate, combine=directions):
        theta[:] = mixed(theta, topology, step)
        for i in range(workers):
            moved = (old[i] - theta[i]) / rate(learning_rate, step)
            estimate[i] = decay * estimate[i] + (1 - decay) * moved
        old = list(theta)
        yield mean(theta), theta
