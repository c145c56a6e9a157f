"""Thérien et al. 2025, algorithm 1: DiLoCo's outer step, with error feedback."""

from functools import partial
from math import ceil

import numpy as np

from recurrences import (
    PART_DRAWS,
    PERIOD,
    SIZES,
    START,
    by_leaf,
    draw_key,
    leaf_draws,
    local_steps,
    mean,
    split_leaf,
)
from recurrences.quantized_sgd import quantized

SETTINGS = [
    {"period": PERIOD, "reduce": "int4", "decay": 0.5, "outer_momentum": 0.5},
    {"period": PERIOD},
    {"period": 3, "outer_lr": 0.7, "outer_momentum": 0.6, "decay": 0.9},
    {"period": 3, "reduce": "int4", "seed": 3},
]
VARIANTS = {"plain": SETTINGS[1]}
DRAWS = (f"u of the rounding, {PART_DRAWS}", ["step", "worker"])
BITS = 4


def recurrence(
    workers, period, outer_lr=0.9, outer_momentum=0.8, reduce="mean", decay=None, seed=0
):
    anchor = START
    velocity = np.zeros_like(START)
    residual = [np.zeros_like(START)] * workers
    part_sizes = [ceil(size / workers) for size in SIZES]
    counts = [(workers + 1) * size for size in part_sizes]

    def rounded(vectors, draws):
        """Each worker's vector as the others decode it, and the mean."""

        def round_leaf(worker, number, leaf):
            u = draws[worker][number].reshape(-1, part_sizes[number])
            parts = enumerate(split_leaf(leaf, workers))
            return np.concatenate([quantized(x, BITS, u[j]) for j, x in parts])

        def round_mean(number, leaf):
            size = part_sizes[number]
            parts = enumerate(split_leaf(leaf, workers))
            u = [draws[j][number].reshape(-1, size) for j in range(workers)]
            return np.concatenate([quantized(x, BITS, u[j][workers]) for j, x in parts])

        messages = [
            by_leaf(partial(round_leaf, worker), vectors[worker])
            for worker in range(workers)
        ]
        return messages, by_leaf(round_mean, mean(messages))

    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            owed = [anchor - theta[i] for i in range(workers)]
            owed = [d + (decay or 0) * e for d, e in zip(owed, residual, strict=True)]
            messages = owed
            g = mean(owed)
            if reduce == "int4":
                keys = [draw_key(seed, step, i) for i in range(workers)]
                messages, g = rounded(owed, [leaf_draws(key, counts) for key in keys])
            residual = [d - q for d, q in zip(owed, messages, strict=True)]
            velocity = outer_momentum * velocity + g
            anchor = anchor - outer_lr * (g + outer_momentum * velocity)
            theta[:] = [anchor] * workers
        yield anchor, theta
