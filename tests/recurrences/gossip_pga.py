"""Chen 2021: gossip after the local step, a global average every so often."""

from recurrences import PERIOD, local_steps, mean
from recurrences.gossip import pair_mean, ring_mean

SETTINGS = [
    {"period": PERIOD},
    {"period": 3, "topology": "ring"},
    {"period": 1},
]


def recurrence(workers, period, topology="exponential"):
    for step, theta in local_steps(workers):
        new = list(theta)
        for i in range(workers):
            if (step + 1) % period == 0:
                theta[i] = mean(new)
            elif topology == "ring":
                theta[i] = ring_mean(new, i)
            else:
                theta[i] = pair_mean(new, i, step)
        yield mean(theta), theta
