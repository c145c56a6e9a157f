"""Koloskova 2019, algorithm 2, with top-k of each leaf.

Here peers know where all start; in the paper they know nothing, or 0, at first.
"""

from recurrences import START, local_steps, mean
from recurrences.graphs import EDGES, WEIGHTS, mixed
from recurrences.topk_sgd import top_k

SETTINGS = [
    (settings, {"first_known": START})
    for settings in (
        {"topology": WEIGHTS, "density": 0.3, "consensus": 0.4},
        {},
        {"density": 0.3, "consensus": 0.4},
        {"density": 1.0, "consensus": 1.0},
        {"topology": "complete", "density": 0.3},
        {"topology": "star", "density": 0.3},
        {"topology": EDGES, "density": 0.3},
    )
]


def recurrence(
    workers, density=0.1, consensus=None, topology="ring", first_known=0.0 * START
):
    consensus = min(1, 2 * density) if consensus is None else consensus
    estimates = [first_known] * workers
    for _, theta in local_steps(workers):
        for i in range(workers):
            estimates[i] = estimates[i] + top_k(theta[i] - estimates[i], density)
        around = mixed(estimates, topology)
        for i in range(workers):
            theta[i] = theta[i] + consensus * (around[i] - estimates[i])
        yield mean(theta), theta
