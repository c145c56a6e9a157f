"""Lin 2018, algorithms 1 and 4: momentum correction, local clipping, factor masking.

Its warm-up divides the density by four.
"""

from math import ceil

import numpy as np
from support.problems import unflatten

from recurrences import START, in_step, mean
from recurrences.topk_sgd import largest

AS_THE_AUTHORS = {"vectors_whole": True}
SETTINGS = [
    (settings, AS_THE_AUTHORS)
    for settings in (
        {"density": 0.2, "dense_steps": 8, "local_clip": 0.5, "local_momentum": 0.6},
        {"dense_steps": 0},
        {"density": 0.3, "dense_steps": 0},
        {"density": 0.02, "dense_steps": 9, "local_momentum": 0.6},
    )
]
ACTS_ON_LEAVES = True


def recurrence(
    workers,
    density=0.001,
    local_momentum=0.9,
    local_clip=None,
    dense_steps=100,
    vectors_whole=False,
):
    """`vectors_whole`: leaves of fewer than two axes are averaged, as in their code."""
    u = np.zeros((workers, START.size))
    v = np.zeros_like(u)

    def step_density(step):
        """1/4, 1/16, … each for a quarter of the warm-up."""
        quarter = 4 * step // dense_steps if step < dense_steps else None
        return density if quarter is None else max(density, 0.25 ** (1 + quarter))

    def combine(grads, theta, step):
        g = np.array(grads)
        messages = np.zeros_like(u)
        mean_grad = mean(grads)
        if local_clip is not None:
            norms = np.linalg.norm(g, axis=1, keepdims=True)
            g = g * np.minimum(1, local_clip / np.sqrt(workers) / norms)
            mean_grad = mean(g)
        start = 0
        for leaf in unflatten(START).values():
            is_whole = vectors_whole and leaf.ndim < 2
            part = slice(start, start + leaf.size)
            start += leaf.size
            for i in range(workers):
                grad = mean_grad[part] if is_whole else g[i, part]
                u[i, part] = local_momentum * u[i, part] + grad
                if is_whole:
                    messages[i, part] = u[i, part]
                    continue
                v[i, part] += u[i, part]
                places = (
                    largest(v[i, part], ceil(step_density(step) * leaf.size))
                    + part.start
                )
                messages[i, places] = v[i, places]
                v[i, places] = u[i, places] = 0
        return [mean(messages)] * workers

    return in_step(workers, combine)
