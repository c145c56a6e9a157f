"""Wang et al. 2019, algorithm 1: u ← β u + (x - mean(θ)) / γ; x ← x - α γ u."""

import numpy as np

from recurrences import LR, PERIOD, START, falling, local_steps, mean, rate

SETTINGS = [
    {"period": 3, "slow_momentum": 0.7, "slow_lr": 0.8, "learning_rate": falling},
    {"period": PERIOD, "learning_rate": LR},
    {"period": PERIOD, "learning_rate": falling},
]
VARIANTS = {"constant_rate": SETTINGS[1]}


def recurrence(workers, period, learning_rate, slow_momentum=0.5, slow_lr=1.0):
    x = START
    u = np.zeros_like(START)
    for step, theta in local_steps(workers, learning_rate):
        if (step + 1) % period == 0:
            gamma = rate(learning_rate, step)
            u = slow_momentum * u + (x - mean(theta)) / gamma
            x = x - slow_lr * gamma * u
            theta[:] = [x] * workers
        yield x, theta
