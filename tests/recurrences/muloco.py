"""Thérien et al. 2025, algorithm 1: DiLoCo's outer step, with error feedback."""

from math import ceil

import numpy as np

from recurrences import (
    BY_PARTS,
    PERIOD,
    SIZES,
    START,
    by_leaf,
    draw_key,
    leaf_draws,
    local_steps,
    mean,
    parts_of,
)
from recurrences.quantized_sgd import quantized

SETTINGS = [
    {"period": PERIOD, "reduce": "int4", "decay": 0.5, "outer_momentum": 0.5},
    {"period": PERIOD},
    {"period": 3, "outer_lr": 0.7, "outer_momentum": 0.6, "decay": 0.9},
    {"period": 3, "reduce": "int4", "seed": 3},
]
VARIANTS = {"plain": SETTINGS[1]}
DRAWS = (f"u of the rounding, {BY_PARTS}", ["step", "worker"])
BITS = 4


def recurrence(
    workers, period, outer_lr=0.9, outer_momentum=0.8, reduce="mean", decay=None, seed=0
):
    anchor, velocity = START, np.zeros_like(START)
    residual = [np.zeros_like(START)] * workers
    parts = [ceil(size / workers) for size in SIZES]
    counts = [(workers + 1) * part for part in parts]

    def rounded(vectors, draws):
        """Each worker's vector as the others decode it, and the mean."""

        def own(worker, number, leaf):
            u = draws[worker][number].reshape(-1, parts[number])
            pieces = enumerate(parts_of(leaf, workers))
            return np.concatenate([quantized(x, BITS, u[j]) for j, x in pieces])

        def again(number, leaf):
            pieces = enumerate(parts_of(leaf, workers))
            u = [draws[j][number].reshape(-1, parts[number]) for j in range(workers)]
            return np.concatenate(
                [quantized(x, BITS, u[j][workers]) for j, x in pieces]
            )

        sent = [
            by_leaf(lambda number, leaf, i=i: own(i, number, leaf), vectors[i])
            for i in range(workers)
        ]
        return sent, by_leaf(again, mean(sent))

    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            owed = [anchor - theta[i] for i in range(workers)]
            owed = [d + (decay or 0) * e for d, e in zip(owed, residual, strict=True)]
            sent, g = owed, mean(owed)
            if reduce == "int4":
                keys = [draw_key(seed, step, i) for i in range(workers)]
                sent, g = rounded(owed, [leaf_draws(key, counts) for key in keys])
            residual = [d - q for d, q in zip(owed, sent, strict=True)]
            velocity = outer_momentum * velocity + g
            anchor = anchor - outer_lr * (g + outer_momentum * velocity)
            theta[:] = [anchor] * workers
        yield anchor, theta
