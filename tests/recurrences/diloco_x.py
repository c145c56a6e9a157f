"""Qi et al. 2025: low-rank outer gradients with error feedback, a round on the way."""

import jax
import numpy as np

from recurrences import FIRST_Q, PERIOD, START, by_leaf, draw_key, local_steps, mean

SETTINGS = [
    {
        "period": 3,
        "outer_lr": 0.3,
        "outer_momentum": 0.5,
        "rank": 1,
        "seed": 4,
        "min_rate": 0.0,
    },
    {"period": PERIOD},
]
DRAWS = (FIRST_Q, ["leaf"])


def low_rank(rank, seed, min_rate):
    """Compresses the workers' vectors by one power iteration a call."""
    q = {}  # by the number of the leaf

    def projection(number, *leaves):
        if leaves[0].ndim < 2:
            return None
        rows_and_columns = min(rank, *leaves[0].shape) * sum(leaves[0].shape)
        if leaves[0].size <= min_rate * rows_and_columns:
            return None
        if number not in q:
            shape = (leaves[0].shape[1], min(rank, *leaves[0].shape))
            q[number] = np.asarray(jax.random.normal(draw_key(seed, number), shape))
        p = np.linalg.qr(mean([m @ q[number] for m in leaves])).Q
        q[number] = mean([m.T @ p for m in leaves])
        return p @ p.T

    def compress(vectors):
        projections = {}

        def find(number, *leaves):
            projections[number] = projection(number, *leaves)
            return leaves[0]

        def project(number, leaf):
            if projections[number] is None:
                return leaf
            return projections[number] @ leaf

        by_leaf(find, *vectors)
        return [by_leaf(project, vector) for vector in vectors]

    return compress


def recurrence(
    workers, period, outer_lr=0.4, outer_momentum=0.5, rank=4, seed=0, min_rate=2.0
):
    anchor = START
    velocity = np.zeros_like(START)
    residual = [np.zeros_like(START)] * workers
    compress = low_rank(rank, seed, min_rate)
    under_way = np.zeros_like(START)
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            owed = [anchor - theta[i] + residual[i] for i in range(workers)]
            messages = compress(owed)
            residual = [owed[i] - messages[i] for i in range(workers)]
            velocity = outer_momentum * velocity + under_way
            anchor = anchor - outer_lr * (under_way + outer_momentum * velocity)
            under_way = mean(messages)
            theta[:] = [anchor] * workers
        yield anchor, theta
