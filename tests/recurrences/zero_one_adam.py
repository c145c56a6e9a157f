"""Lu et al. 2023, algorithm 1, with m after the gradient, as in its authors' code.

The scale of signs is the mean magnitude of each part of a leaf, as in `one_bit_adam`.
"""

import numpy as np

from recurrences import (
    LR,
    PERIOD,
    START,
    falling,
    local_steps,
    mean,
    one_bit_adam,
    rate,
)

SETTINGS = [
    {"variance_steps": 7, "refreshes": 3, "period": 3, "b1": 0.6, "b2": 0.9},
    {"variance_steps": 4, "refreshes": 1, "period": PERIOD, "eps": 1.0},
    {"variance_steps": 20, "refreshes": 3, "eps": 0.5},
    {"eps": 0.5},
]
SETTINGS = [
    {**each, "learning_rate": (LR / 4, falling)[number % 2]}
    for number, each in enumerate(SETTINGS)
]


def refreshes_of(kappa, end):
    """The steps at which v is refreshed: κ of each interval, which doubles."""
    steps, step, interval = [], 0, 1
    while step < end:
        for _ in range(kappa):
            steps.append(step)
            step += interval
        interval *= 2
    return [step for step in steps if step < end]


def recurrence(
    workers,
    learning_rate,
    variance_steps=100,
    period=16,
    refreshes=16,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
):
    m, u, e = (np.zeros((workers, START.size)) for _ in range(3))
    v, server = np.zeros_like(START), np.zeros_like(START)
    anchor, gone, begun = START, 0.0, 0
    most = (1 - b1) / np.sqrt((1 - b2) * (1 - b1**2 / b2))
    refreshed = refreshes_of(refreshes, variance_steps)

    def direction(m):
        return np.clip(m / (np.sqrt(v) + eps), -most, most)

    def combine(grads, theta, step):
        if step in refreshed:
            v[:] = b2 * v + (1 - b2) * mean(grads) ** 2
        m[:] = b1 * m + (1 - b1) * np.array(grads)
        u[:] += rate(learning_rate, step) * m
        return [direction(own) for own in m]

    for step, theta in local_steps(workers, learning_rate, combine):
        gone += rate(learning_rate, step)
        if step + 1 - begun == (1 if begun < variance_steps else period):
            x = u + e
            sent = np.array([one_bit_adam.compressed(own, workers) for own in x])
            e = x - sent
            y = mean(sent) + server
            total = one_bit_adam.compressed(y, workers)
            server = y - total
            m[:], u[:] = total / gone, 0
            anchor = anchor - gone * direction(total / gone)
            theta[:] = [anchor] * workers
            gone, begun = 0.0, step + 1
        yield anchor, theta
