"""Karimireddy 2020, algorithm 1, option II, all workers, global rate 1."""

import numpy as np

from recurrences import LR, PERIOD, START, falling, local_steps, mean, rate

SETTINGS = [
    {"period": PERIOD, "learning_rate": falling},
    {"period": PERIOD, "learning_rate": LR},
    {"period": 1, "learning_rate": falling},
]
VARIANTS = {"constant_rate": SETTINGS[1]}


def recurrence(workers, period, learning_rate):
    x = START
    c = np.zeros_like(START)
    rates = 0.0
    control = [c] * workers

    def corrected(grads, theta, step):
        return [g - control[i] + c for i, g in enumerate(grads)]

    for step, theta in local_steps(workers, learning_rate, corrected):
        rates += rate(learning_rate, step)
        if (step + 1) % period == 0:
            old = list(control)
            for i in range(workers):
                control[i] = old[i] - c + (x - theta[i]) / rates
            x = mean(theta)
            c = c + mean([control[i] - old[i] for i in range(workers)])
            theta[:] = [x] * workers
            rates = 0.0
        yield mean(theta), theta
