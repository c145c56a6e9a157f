"""Liu 2024, algorithm 1: Lion with signs of own momentum, voted on or averaged."""

import numpy as np

from recurrences import START, local_steps
from recurrences.sign_sgd import voted

SETTINGS = [
    {},
    {"beta1": 0.5, "beta2": 0.8, "seed": 3},
    {"majority": False},
    {"majority": False, "beta1": 0.0, "seed": 3},
]


def recurrence(workers, beta1=0.9, beta2=0.99, majority=True, seed=0):
    momentum = np.zeros((workers, START.size))

    def combine(grads, theta, step):
        direction = beta1 * momentum + (1 - beta1) * np.array(grads)
        momentum[:] = beta2 * momentum + (1 - beta2) * np.array(grads)
        return [voted(direction, step, seed, majority)] * workers

    for _, theta in local_steps(workers, combine=combine):
        yield theta[0], theta
