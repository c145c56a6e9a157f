"""Kolehmainen et al. 2025, equation 2: an outer step with a random partner."""

import jax
import numpy as np

from recurrences import PERIOD, START, draw_key, local_steps, mean

SETTINGS = [
    {"period": 3, "outer_lr": 0.5, "outer_momentum": 0.3, "consensus": 0.4, "seed": 1},
    {"period": PERIOD},
    {"period": PERIOD, "consensus": 0.0, "seed": 2},
]
DRAWS = ("each worker's partner", ["step"])


def matchings(workers, seed):
    """The distinct ones of 16 random matchings, sorted: each worker's partner."""
    partners = set()
    for number in range(16):
        order = np.random.default_rng([seed, number]).permutation(workers)
        partner = list(range(workers))
        half = workers // 2
        for i, j in zip(order[:half], order[half : 2 * half], strict=True):
            partner[i] = int(j)
            partner[j] = int(i)
        partners.add(tuple(partner))
    return sorted(partners)


def recurrence(
    workers, period, outer_lr=0.7, outer_momentum=0.5, consensus=0.7, seed=0
):
    table = matchings(workers, seed)
    phi = [START] * workers
    delta = [np.zeros_like(START)] * workers
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            partner = table[jax.random.randint(draw_key(seed, step), (), 0, len(table))]
            moved = [theta[i] - phi[i] for i in range(workers)]
            pull = [mean([phi[i], phi[partner[i]]]) - phi[i] for i in range(workers)]
            for i in range(workers):
                along = mean([moved[i], moved[partner[i]]])
                delta[i] = (
                    outer_momentum * delta[i] + outer_lr * along + consensus * pull[i]
                )
            phi = [phi[i] + delta[i] for i in range(workers)]
            theta[:] = phi
        yield mean(phi), theta
