"""Mishchenko 2022, algorithm 2 (Scaffnew)."""

import jax
import jax.numpy as jnp
import numpy as np

from recurrences import LR, START, draw_key, falling, local_steps, mean, rate

SETTINGS = [
    {"period": 2, "learning_rate": falling, "seed": 5},
    {"period": 3, "learning_rate": LR},
    {"period": 1, "learning_rate": LR},
]
DRAWS = ("a sync if it is below 1 / period", ["step"])


def recurrence(workers, period, learning_rate, seed=0):
    p = 1 / period
    control = [np.zeros_like(START)] * workers

    def corrected(grads, theta, step):
        return [grads[i] - control[i] for i in range(workers)]

    for step, theta in local_steps(workers, learning_rate, corrected):
        if jax.random.uniform(draw_key(seed, step), (), jnp.float32) < p:
            gamma = rate(learning_rate, step)
            models = list(theta)
            x = mean([models[i] - gamma / p * control[i] for i in range(workers)])
            for i in range(workers):
                control[i] = control[i] + p / gamma * (x - models[i])
            theta[:] = [x] * workers
        yield mean(theta), theta
