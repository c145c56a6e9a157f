"""Lu et al. 2023, algorithm 1, with the signs of `one_bit_adam`.

The paper's step and u are of the m and v from before the gradient. A round of one step
then sends that m in the place of the new one: from 0, nothing moves before the variance
is frozen. DeepSpeed, and this library, take those with the gradient: `after_gradient`.
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

FAST = {"variance_steps": 7, "refreshes": 3, "period": 3, "b1": 0.6, "b2": 0.9}
AS_DEEPSPEED = {"after_gradient": True}
SETTINGS = [
    ({**FAST, "learning_rate": LR / 4, "eps": 0.4}, AS_DEEPSPEED),
    ({"refreshes": 1, "learning_rate": falling, "eps": 1.0}, AS_DEEPSPEED),
    ({**FAST, "learning_rate": LR / 4}, {**AS_DEEPSPEED, "bounded": True}),
    (
        {
            "variance_steps": 4,
            "refreshes": 1,
            "period": PERIOD,
            "learning_rate": falling,
            "eps": 1.0,
        },
        AS_DEEPSPEED,
    ),
]


def refresh_steps(kappa, end):
    """The steps at which v is refreshed: κ of each interval, which doubles."""
    steps = []
    step = 0
    interval = 1
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
    after_gradient=False,
    bounded=False,
):
    """`bounded`: an entry's step is at most Adam's longest."""
    m, u, e = (np.zeros((workers, START.size)) for _ in range(3))
    v, used, server = (np.zeros_like(START) for _ in range(3))
    anchor = START
    rate_sum = 0.0
    begun = 0
    bound = one_bit_adam.longest_step(b1, b2) if bounded else np.inf
    refreshed = refresh_steps(refreshes, variance_steps)

    def direction(m):
        return np.clip(m / (np.sqrt(used) + eps), -bound, bound)

    def update_moments(grads, step):
        if step in refreshed:
            v[:] = b2 * v + (1 - b2) * mean(grads) ** 2
        m[:] = b1 * m + (1 - b1) * np.array(grads)

    def combine(grads, theta, step):
        if after_gradient:
            update_moments(grads, step)
        u[:] += rate(learning_rate, step) * m
        used[:] = v
        steps = [direction(worker_m) for worker_m in m]
        if not after_gradient:
            update_moments(grads, step)
        return steps

    for step, theta in local_steps(workers, learning_rate, combine):
        rate_sum += rate(learning_rate, step)
        if step + 1 - begun == (1 if begun < variance_steps else period):
            x = u + e
            messages = np.array(
                [one_bit_adam.compressed(vector, workers) for vector in x]
            )
            e = x - messages
            y = mean(messages) + server
            total = one_bit_adam.compressed(y, workers)
            server = y - total
            m[:] = total / rate_sum
            u[:] = 0
            anchor = anchor - rate_sum * direction(total / rate_sum)
            theta[:] = [anchor] * workers
            rate_sum = 0.0
            begun = step + 1
        yield anchor, theta
