"""Liu 2024, algorithm 1: Lion with signs of own momentum, voted on or averaged."""

import numpy as np

from recurrences import START, in_step
from recurrences.sign_sgd import DRAWN, NO_TIES, voted

SETTINGS = [
    {"b1": 0.6, "b2": 0.8, "seed": 3},
    {},
    ({"majority": True}, NO_TIES),
    ({"majority": True, "b1": 0.0, "seed": 3}, DRAWN),
]


def recurrence(workers, b1=0.9, b2=0.99, majority=False, seed=0, zeros_drawn=False):
    momentum = np.zeros((workers, START.size))

    def combine(grads, theta, step):
        direction = b1 * momentum + (1 - b1) * np.array(grads)
        momentum[:] = b2 * momentum + (1 - b2) * np.array(grads)
        return [voted(direction, step, seed, zeros_drawn, majority)] * workers

    return in_step(workers, combine)
