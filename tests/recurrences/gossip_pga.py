"""Chen 2021: gossip after the local step, a global average every so often."""

from recurrences import PERIOD, local_steps, mean
from recurrences.graphs import CHANGING, EDGES, mixed

SETTINGS = [
    {"period": 5, "topology": CHANGING},
    {"period": PERIOD},
    {"period": 3, "topology": "ring"},
    {"period": 1},
    {"period": 3, "topology": "hypercube"},
    {"period": 3, "topology": EDGES},
    {"period": 3, "topology": "static_exponential"},
]


def recurrence(workers, period, topology="exponential"):
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            theta[:] = [mean(theta)] * workers
        else:
            theta[:] = mixed(theta, topology, step)
        yield mean(theta), theta
