"""Iacob et al. 2025, algorithm 1: params and moments are averaged at own periods."""

import numpy as np

from recurrences import LR, PERIOD, START, STEPS, local_steps, mean, worker_gradient

SETTINGS = [
    {"period": 3, "first_period": 2, "second_period": 5},
    {"period": PERIOD},
    {"period": PERIOD, "first_period": 6},
]
ADAM_SETTINGS = [
    {"period": 2},
    {"period": PERIOD, "first_period": 3, "second_period": 5},
    {"period": 5, "first_period": 2, "second_period": 3},
]


def recurrence(workers, period, first_period=None, second_period=None):
    """Under heavy ball, which has no second moments."""
    momentum = [np.zeros_like(START)] * workers
    for step, theta in local_steps(workers, momentum=momentum):
        if (step + 1) % period == 0:
            theta[:] = [mean(theta)] * workers
        if (step + 1) % (first_period or 3 * period) == 0:
            momentum[:] = [mean(momentum)] * workers
        yield mean(theta), theta


def adam_recurrence(workers, period, first_period=None, second_period=None):
    """Under Adam (Kingma and Ba 2015, algorithm 1)."""
    beta1 = 0.9
    beta2 = 0.999
    epsilon = 1e-8
    theta = [START] * workers
    m, v = ([np.zeros_like(START)] * workers for _ in range(2))
    for t in range(1, STEPS + 1):
        for i in range(workers):
            g = worker_gradient(theta[i], t - 1, i, workers)
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            m_hat = m[i] / (1 - beta1**t)
            v_hat = v[i] / (1 - beta2**t)
            theta[i] = theta[i] - LR * m_hat / (np.sqrt(v_hat) + epsilon)
        if t % period == 0:
            theta = [mean(theta)] * workers
        if t % (first_period or 3 * period) == 0:
            m = [mean(m)] * workers
        if t % (second_period or 6 * period) == 0:
            v = [mean(v)] * workers
        yield mean(theta), theta
