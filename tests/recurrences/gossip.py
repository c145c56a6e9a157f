"""Ying 2021, one-peer exponential graph; ring: Lian 2017, algorithm 1."""

from math import ceil, log2

import numpy as np

from recurrences import START, local_steps, mean

SETTINGS = [
    {},
    {"topology": "ring"},
    {"mix_opt_state": True},
    {"topology": "ring", "mix_opt_state": True},
]


def peer(worker, step, workers):
    """The worker that this one hears at a step: a power of two ahead."""
    return (worker + 2 ** (step % ceil(log2(workers)))) % workers


def ring_mean(values, worker):
    """The mean of the values of a worker and both its neighbours."""
    return (
        values[worker - 1] + values[worker] + values[(worker + 1) % len(values)]
    ) / 3


def pair_mean(values, worker, step):
    """The mean of the values of a worker and its peer of this step."""
    workers = len(values)
    if workers == 1:
        return values[0]
    return (values[worker] + values[peer(worker, step, workers)]) / 2


def recurrence(workers, topology="exponential", mix_opt_state=False):
    old, momentum = [START] * workers, [np.zeros_like(START)] * workers
    for step, theta in local_steps(workers, momentum=momentum):
        new, heavy = list(theta), list(momentum)
        for i in range(workers):
            if topology == "ring":
                theta[i] = ring_mean(old, i) + (new[i] - old[i])
                mixed = ring_mean(heavy, i)
            else:
                theta[i] = pair_mean(new, i, step)
                mixed = pair_mean(heavy, i, step)
            if mix_opt_state:
                momentum[i] = mixed
        old = list(theta)
        yield mean(theta), theta
