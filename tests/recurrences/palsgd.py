"""Naganuma 2025, with the details of the authors' code: steps without a gradient."""

import jax
import numpy as np

from recurrences import LR, PERIOD, START, draw_key, falling, local_steps, mean, rate

SETTINGS = [
    {
        "period": PERIOD,
        "learning_rate": falling,
        "chance": 0.375,  # exact in the float32 of the rate, and so is 0.75 / 0.375
        "seed": 5,
        "proximal": 0.75,
        "outer_lr": 0.4,
    },
    {"period": PERIOD, "learning_rate": LR},
    {
        "period": 6,
        "learning_rate": LR,
        "proximal": 0.7,
        "outer_lr": 0.4,
        "outer_momentum": 0.5,
    },
]
DRAWS = ("a pull, not a gradient step, if it is below chance", ["step"])


def recurrence(
    workers,
    period,
    learning_rate,
    chance=0.2,
    proximal=0.5,
    outer_lr=0.7,
    outer_momentum=0.9,
    seed=0,
    momentum=None,
):
    """`momentum` is where the workers' own is held, which then rests with its draws."""
    anchor = START
    velocity = np.zeros_like(START)
    old = [START] * workers
    old_momentum = [np.zeros_like(START)] * workers
    for step, theta in local_steps(workers, learning_rate, momentum=momentum):
        if jax.random.uniform(draw_key(seed, step), (), np.float32) < chance:
            share = rate(learning_rate, step) * proximal / chance
            theta[:] = [x - share * (x - anchor) for x in old]
            if momentum is not None:
                momentum[:] = old_momentum
        else:
            updates = [new - x for new, x in zip(theta, old, strict=True)]
            theta[:] = [x + u / (1 - chance) for x, u in zip(old, updates, strict=True)]
        if (step + 1) % period == 0:
            pseudo_gradient = anchor - mean(theta)
            velocity = outer_momentum * velocity + pseudo_gradient
            look_ahead = pseudo_gradient + outer_momentum * velocity
            anchor = anchor - outer_lr * look_ahead
            theta[:] = [anchor] * workers
        old = list(theta)
        old_momentum = list(momentum or old_momentum)
        yield anchor, theta
