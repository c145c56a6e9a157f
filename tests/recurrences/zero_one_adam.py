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
    after_gradient=False,
    bounded=False,
):
    """`bounded`: an entry's step is at most Adam's longest."""
    m, u, e = (np.zeros((workers, START.size)) for _ in range(3))
    v, used, server = (np.zeros_like(START) for _ in range(3))
    anchor, gone, begun = START, 0.0, 0
    most = one_bit_adam.longest_step(b1, b2) if bounded else np.inf
    refreshed = refreshes_of(refreshes, variance_steps)

    def direction(m):
        return np.clip(m / (np.sqrt(used) + eps), -most, most)

    def take_in(grads, step):
        if step in refreshed:
            v[:] = b2 * v + (1 - b2) * mean(grads) ** 2
        m[:] = b1 * m + (1 - b1) * np.array(grads)

    def combine(grads, theta, step):
        if after_gradient:
            take_in(grads, step)
        u[:] += rate(learning_rate, step) * m
        used[:] = v
        steps = [direction(own) for own in m]
        if not after_gradient:
            take_in(grads, step)
        return steps

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
