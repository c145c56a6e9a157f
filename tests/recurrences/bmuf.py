"""Chen and Huo 2016: G = mean(θ) - y; Δ ← μ Δ + ζ G; w ← w + Δ."""

import numpy as np

from recurrences import PERIOD, START, local_steps, mean

SETTINGS = [
    {"period": PERIOD, "block_momentum": 0.8, "block_lr": 1.2, "nesterov": True},
    {"period": PERIOD},
    {"period": PERIOD, "block_momentum": 0.6, "block_lr": 0.7},
    {"period": PERIOD, "nesterov": True},
]
VARIANTS = {"plain": SETTINGS[2]}


def recurrence(workers, period, block_momentum=None, block_lr=1.0, nesterov=False):
    mu = 1 - 1 / workers if block_momentum is None else block_momentum
    w = START
    y = START
    delta = np.zeros_like(START)
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            block_update = mean(theta) - y
            delta = mu * delta + block_lr * block_update
            w = w + delta
            y = w + mu * delta if nesterov else w
            theta[:] = [y] * workers
        yield w, theta
