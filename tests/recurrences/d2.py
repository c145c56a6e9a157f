"""Tang 2018, algorithm 1: xₜ₊₁ = V (2 xₜ - xₜ₋₁ + uₜ - uₜ₋₁), x₁ = V (x₀ + u₀).

V is the graph's matrix mixed with the identity, u the inner updates.
"""

from recurrences import START, local_steps, mean
from recurrences.graphs import EDGES, WEIGHTS, mixed

SETTINGS = [
    {"topology": WEIGHTS, "mixing": 0.3},
    {},
    {"mixing": 1.0},
    {"mixing": 0.3},
    {"topology": "complete"},
    {"topology": "star"},
    {"topology": EDGES},
]


def recurrence(workers, mixing=0.5, topology="ring"):
    old = [START] * workers
    older = None
    old_updates = None
    for _, theta in local_steps(workers):
        updates = [theta[i] - old[i] for i in range(workers)]
        if older is None or old_updates is None:
            ahead = list(theta)
        else:
            ahead = [
                2 * old[i] - older[i] + updates[i] - old_updates[i]
                for i in range(workers)
            ]
        around = mixed(ahead, topology)
        for i in range(workers):
            theta[i] = (1 - mixing) * ahead[i] + mixing * around[i]
        old_updates = updates
        older = old
        old = list(theta)
        yield mean(theta), theta
