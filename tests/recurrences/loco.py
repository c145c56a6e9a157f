"""Xie 2025: low-bit gradients with averaged errors fed back, on both hops."""

import numpy as np

from recurrences import START, by_leaf, in_step, mean, split_leaf
from recurrences.quantized_sgd import quantized

SETTINGS = [{"bits": 2, "beta": 0.7, "reset_period": 5}, {}, {"bits": 8, "beta": 0.0}]


def recurrence(workers, bits=4, beta=0.8, reset_period=1024):
    e = np.zeros((workers, START.size))
    server = np.zeros_like(START)

    def coded(x):
        """Q(x), by the parts of each leaf."""

        def of_leaf(number, leaf):
            # To nearest: as at random, but where the draw is a half.
            half = np.full(leaf.size, 0.5)
            parts = split_leaf(leaf, workers)
            return np.concatenate([quantized(part, bits, half) for part in parts])

        return by_leaf(of_leaf, x)

    def combine(grads, theta, step):
        x = np.array(grads) + e
        d = np.array([coded(vector) for vector in x])
        y = mean(d) + server
        g = coded(y)
        e[:] = beta * e + (1 - beta) * (x - d)
        server[:] = beta * server + (1 - beta) * (y - g)
        if (step + 1) % reset_period == 0:
            e[:] = 0
            server[:] = 0
        return [g] * workers

    return in_step(workers, combine)
