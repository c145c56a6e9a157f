"""Sun et al. 2024, algorithm 1: what arrives at a sync was sent a round before.

Λ, which the paper calls the penalty of the staleness gap, is 1 + how far x has moved
since what arrives was measured, in units of what arrives.
"""

import numpy as np

from recurrences import PERIOD, START, local_steps, mean

SETTINGS = [
    {"period": 2, "entry_clip": 0.02, "outer_momentum": 0.2, "outer_lr": 0.6},
    {"period": PERIOD},
    {"period": 2, "outer_momentum": 0.8, "outer_lr": 0.6},
    {"period": 3, "penalty": False, "outer_momentum": 0.0},
]


def recurrence(
    workers, period, outer_lr=1.0, outer_momentum=0.0, entry_clip=None, penalty=True
):
    x = START
    old_x = START
    m = np.zeros_like(START)
    rounds = []  # (the x of a round's start, the mean at its end)
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            rounds.append((x, mean(theta)))
            new_x = x
            if len(rounds) > 1:
                round_start, round_end = rounds[-2]
                moves = round_start - round_end
                gap = np.linalg.norm(x - old_x) / np.linalg.norm(moves)
                m = outer_momentum * m + moves / (1 + gap if penalty else 1)
                outer_step = m
                if entry_clip is not None:
                    outer_step = np.clip(m, -entry_clip, entry_clip)
                new_x = x - outer_lr * outer_step
            old_x = x
            x = new_x
            theta[:] = [x] * workers
        yield x, theta
