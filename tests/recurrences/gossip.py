"""Ying 2021, one-peer exponential graph; any other: Lian 2017, algorithm 1."""

from math import ceil, log2

import numpy as np

from recurrences import START, local_steps, mean
from recurrences.graphs import CHANGING, WEIGHTS, is_named, mixed

SETTINGS = [
    {"topology": CHANGING, "mix_opt_state": True},
    {"mix_opt_state": True},
    {},
    {"topology": "ring"},
    {"topology": "ring", "mix_opt_state": True},
    {"topology": "star"},
    {"topology": WEIGHTS},
]


def peer(worker, step, workers):
    """The worker that this one hears at a step: a power of two ahead."""
    return (worker + 2 ** (step % ceil(log2(workers)))) % workers


def recurrence(workers, topology="exponential", mix_opt_state=False):
    old = [START] * workers
    momentum = [np.zeros_like(START)] * workers
    for step, theta in local_steps(workers, momentum=momentum):
        if is_named(topology, "exponential"):
            theta[:] = mixed(theta, topology, step)
        else:
            moved = [new - x for new, x in zip(theta, old, strict=True)]
            pairs = zip(mixed(old, topology, step), moved, strict=True)
            theta[:] = [x + u for x, u in pairs]
        if mix_opt_state:
            momentum[:] = mixed(momentum, topology, step)
        old = list(theta)
        yield mean(theta), theta
