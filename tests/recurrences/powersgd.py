"""Vogels 2019, algorithms 1 and 2; the rate is that of PyTorch's hook."""

import jax
import numpy as np

from recurrences import FIRST_Q, START, by_leaf, draw_key, in_step, mean

SETTINGS = [
    {"rank": 1, "min_rate": 0.0, "dense_steps": 5},
    {"min_rate": 0.0},
    {},
    {"rank": 1, "seed": 5, "min_rate": 1.0},
]
DRAWS = (FIRST_Q, ["leaf"])


def recurrence(workers, rank=2, seed=0, min_rate=2.0, dense_steps=0):
    residual = [np.zeros_like(START)] * workers
    q = {}
    p_hat = {}  # by the number of the leaf

    def is_compressed(leaf):
        if leaf.ndim < 2:
            return False
        return leaf.size > min_rate * min(rank, *leaf.shape) * sum(leaf.shape)

    def first_q(number, matrix):
        shape = (matrix.shape[1], min(rank, *matrix.shape))
        return np.asarray(jax.random.normal(draw_key(seed, number), shape))

    def combined(number, *leaves):
        if not is_compressed(leaves[0]):
            return mean(leaves)
        if number not in q:
            q[number] = first_q(number, leaves[0])
        p_hat[number] = np.linalg.qr(mean([m @ q[number] for m in leaves])).Q
        q[number] = mean([m.T @ p_hat[number] for m in leaves])
        return p_hat[number] @ q[number].T

    def lost(number, leaf):
        if not is_compressed(leaf):
            return np.zeros_like(leaf)
        return leaf - p_hat[number] @ p_hat[number].T @ leaf

    def compressed(grads, theta, step):
        if step < dense_steps:
            return [mean(grads)] * workers
        m = [grads[i] + residual[i] for i in range(workers)]
        g = by_leaf(combined, *m)
        residual[:] = [by_leaf(lost, m[i]) for i in range(workers)]
        return [g] * workers

    return in_step(workers, compressed)
