"""Cheng et al. 2025: the pseudo-gradient penalty, leaf by leaf.

A worker's norms have a mean and a variance with weights that decay by 1 - α; they are
written out here as weighted sums over all of its norms so far, unusual ones included.
"""

import numpy as np

from recurrences import PERIOD, SIZES, START, by_leaf, local_steps

AS_THE_AUTHORS = {"epsilon": 1e-6}
SETTINGS = [
    (
        {
            "period": 1,
            "threshold": 0.8,
            "trusted": 2,
            "leaf_clip": 0.02,
            "outer_lr": 0.6,
            "forgetting": 0.3,
        },
        AS_THE_AUTHORS,
    ),
    {"period": PERIOD},
    {"period": 2, "threshold": 0.3, "trusted": 1, "forgetting": 0.3},
    ({"period": 3, "leaf_clip": 0.05, "outer_momentum": 0.5}, AS_THE_AUTHORS),
]


def is_usual(norm, earlier, threshold, forgetting, trusted):
    if len(earlier) < trusted:
        return True
    weights = (1 - forgetting) ** np.arange(len(earlier))[::-1]
    mean = np.average(earlier, weights=weights)
    variance = np.average((np.array(earlier) - mean) ** 2, weights=weights)
    return norm <= mean + threshold * np.sqrt(variance)


def recurrence(
    workers,
    period,
    outer_lr=0.8,
    outer_momentum=0.85,
    threshold=3.0,
    leaf_clip=10.0,
    forgetting=0.02,
    trusted=10,
    epsilon=0.0,
):
    """`epsilon` is added to the norm in the factor that clips."""
    anchor = START
    velocity = np.zeros_like(START)
    norms = {index: [] for index in np.ndindex(workers, len(SIZES))}

    def penalised(number, *moves):
        """The g of a leaf, NaN where no worker's norm is usual."""
        weighted_moves = []
        for i, d in enumerate(moves):
            norm = np.sqrt(np.sum(d**2))
            earlier = norms[i, number]
            if is_usual(norm, earlier, threshold, forgetting, trusted):
                weighted_moves.append((np.exp(-norm), d))
            earlier.append(norm)
        if not weighted_moves:
            return np.full_like(moves[0], np.nan)
        total_weight = sum(w for w, _ in weighted_moves)
        g = sum(w * d for w, d in weighted_moves) / total_weight
        return g * min(1, leaf_clip / (np.sqrt(np.sum(g**2)) + epsilon))

    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            g = by_leaf(penalised, *(anchor - x for x in theta))
            m = outer_momentum * velocity + g
            moved = anchor - outer_lr * (g + outer_momentum * m)
            velocity = np.where(np.isnan(g), velocity, m)
            anchor = np.where(np.isnan(g), anchor, moved)
            theta[:] = [anchor] * workers
        yield anchor, theta
