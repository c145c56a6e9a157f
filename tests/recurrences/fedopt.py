"""Reddi et al. 2021, algorithm 2, with all clients: FedAdam, FedYogi, FedAdagrad."""

import numpy as np

from recurrences import PERIOD, START, local_steps, mean

SETTINGS = [
    {"period": 3, "outer_lr": 0.04, "b1": 0.6, "b2": 0.999, "tau": 1e-2},
    {"period": PERIOD},
    {"period": PERIOD, "method": "yogi", "outer_lr": 0.05, "b2": 0.9},
    {"period": 3, "method": "adagrad", "b1": 0.0, "tau": 0.1},
]
VARIANTS = {"yogi": SETTINGS[2], "adagrad": SETTINGS[3]}


def recurrence(
    workers, period, method="adam", outer_lr=0.03, b1=0.9, b2=0.99, tau=1e-3
):
    x = START
    m = np.zeros_like(START)
    v = np.full_like(START, tau**2)
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            delta = mean([y - x for y in theta])
            m = b1 * m + (1 - b1) * delta
            if method == "adagrad":
                v = v + delta**2
            elif method == "yogi":
                v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
            else:
                v = b2 * v + (1 - b2) * delta**2
            x = x + outer_lr * m / (np.sqrt(v) + tau)
            theta[:] = [x] * workers
        yield x, theta
