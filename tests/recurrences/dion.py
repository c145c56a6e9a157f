"""Ahn 2025, with Lion for vectors, as the authors' code reduces P and R over workers.

There a matrix is (outputs, inputs), and P by default of its longer side; here it is
(inputs, outputs), and P of the inputs, as there for one whose outputs are sharded.
"""

from math import ceil

import jax
import numpy as np

from recurrences import FIRST_Q, START, by_leaf, draw_key, in_step, mean

AS_THE_AUTHORS = {"epsilon": 1e-8}
SETTINGS = [
    ({"rank_fraction": 0.6, "local_momentum": 0.7}, AS_THE_AUTHORS),
    ({}, AS_THE_AUTHORS),
    ({"rank_fraction": 1.0, "seed": 5}, AS_THE_AUTHORS),
    ({"rank_fraction": 0.6, "local_momentum": 0.0}, AS_THE_AUTHORS),
]
DRAWS = (FIRST_Q, ["leaf"])


def recurrence(workers, rank_fraction=0.25, local_momentum=0.95, seed=0, epsilon=0.0):
    """`epsilon` is added to the norms by which the columns of Q are divided."""
    momentum = np.zeros((workers, START.size))
    q = {}
    reconstructed = {}  # by the number of the leaf

    def first_q(number, matrix):
        shape = matrix.shape[1], ceil(rank_fraction * min(matrix.shape))
        return np.asarray(jax.random.normal(draw_key(seed, number), shape))

    def direction(number, grad, vector, *owed):
        if owed[0].ndim < 2:
            return np.sign(0.95 * vector + 0.05 * grad)
        if number not in q:
            q[number] = first_q(number, grad)
        p = np.linalg.qr(mean([b @ q[number] for b in owed])).Q
        r = mean([b.T @ p for b in owed])
        reconstructed[number] = p @ r.T
        q[number] = r / (np.linalg.norm(r, axis=0) + epsilon)
        fan_in, fan_out = grad.shape
        return np.sqrt(fan_out / fan_in) * p @ q[number].T

    def new_momentum(number, grad, vector, owed):
        if owed.ndim < 2:
            return 0.98 * vector + 0.02 * grad
        return owed - (1 - local_momentum) * reconstructed[number]

    def combine(grads, theta, step):
        owed = momentum + np.array(grads)
        grad = mean(grads)
        # Lion's momentum is the same on all workers.
        steps = by_leaf(direction, grad, momentum[0], *owed)
        for i in range(workers):
            momentum[i] = by_leaf(new_momentum, grad, momentum[i], owed[i])
        return [steps] * workers

    return in_step(workers, combine)
