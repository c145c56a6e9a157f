"""McMahan et al. 2017, algorithm 1: the mean of some random clients' models.

The paper takes max(C K, 1) of K = 100. Of few workers one is no average: two take part.
Between syncs the center is the mean of those who take part in the round.
"""

import jax

from recurrences import PERIOD, draw_key, local_steps, mean

SETTINGS = [
    {"period": PERIOD, "fraction": 0.75, "seed": 1},
    {"period": PERIOD},
    ({"period": 3, "fraction": 0.1, "seed": 2}, {"least": 2}),
]
DRAWS = (
    "worker i takes part if its number is below fraction × workers",
    ["last step of the round"],
)


def recurrence(workers, period, fraction=1.0, seed=0, least=1):
    clients = min(workers, max(least, round(fraction * workers)))
    for step, theta in local_steps(workers):
        end = step - step % period + period - 1
        place = jax.random.permutation(draw_key(seed, end), workers)
        model = mean([theta[i] for i in range(workers) if place[i] < clients])
        if (step + 1) % period == 0:
            theta[:] = [model] * workers
        yield model, theta
