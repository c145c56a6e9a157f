"""Alistarh 2017 (QSGD), with s = max |x|, in the two phases of an all-reduce."""

from math import ceil

import numpy as np

from recurrences import PART_DRAWS, SIZES, by_leaf, draw_key, in_step, leaf_draws, mean

SETTINGS = [{"bits": 4, "seed": 5}, {}, {"bits": 2}]
DRAWS = (f"u of the rounding, {PART_DRAWS}", ["step", "worker"])


def quantized(x, bits, draws):
    """Q(x) = floor(L x / s + u) s / L, with s the largest |x|."""
    levels = 2 ** (bits - 1) - 1
    s = np.max(np.abs(x), initial=0)
    if s == 0:
        return x
    return np.floor(levels * (x / s) + draws[: x.size]) * s / levels


def recurrence(workers, bits=8, seed=0):
    part_sizes = [ceil(size / workers) for size in SIZES]  # what a worker averages
    counts = [(workers + 1) * size for size in part_sizes]

    def combine(grads, theta, step):
        draws = [leaf_draws(draw_key(seed, step, i), counts) for i in range(workers)]

        def all_reduced(number, *leaves):
            """Worker j averages part j of all workers' leaves, and sends it on."""
            size = part_sizes[number]
            means = []
            u = [draws[i][number].reshape(-1, size) for i in range(workers)]
            for j in range(workers):
                part = slice(j * size, (j + 1) * size)
                arrived = [
                    quantized(x.ravel()[part], bits, u[i][j])
                    for i, x in enumerate(leaves)
                ]
                means.append(quantized(mean(arrived), bits, u[j][workers]))
            return np.concatenate(means)

        return [by_leaf(all_reduced, *grads)] * workers

    return in_step(workers, combine)
