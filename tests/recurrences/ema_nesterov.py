"""Yau et al. 2026: θ⁺ = A(θ + β_t m); m ← γ m + (1 - γ) (θ⁺ - θ)."""

import numpy as np

from recurrences import LR, START, falling, local_steps, mean, rate


def warmed_up(step):
    """A rate that begins at 0 and rises, then falls."""
    return (8 - abs(step - 6)) / 128 - 1 / 64 * (step == 0)


SETTINGS = [
    {"learning_rate": warmed_up, "decay": 0.8},
    {"learning_rate": falling, "decay": 0.9},
    {"learning_rate": LR, "lookahead": 0.9, "decay": 0.5},
]


def recurrence(workers, learning_rate, decay=0.99, lookahead=0.3):
    model = START
    m = np.zeros_like(START)

    def averaged(grads, theta, step):
        return [mean(grads)] * workers

    for step, theta in local_steps(workers, learning_rate, averaged):
        m = decay * m + (1 - decay) * (theta[0] - model)
        model = theta[0]
        # The gradient of the next step is taken ahead, by that step's share.
        rates = [rate(learning_rate, s) for s in range(step + 2)]
        beta = lookahead * rates[-1] / max(rates)
        theta[:] = [model + beta * m] * workers
        yield model, theta
