"""Graphs of workers for the recurrences: weights by their definitions."""

from itertools import permutations
from math import ceil, log2

import numpy as np

# Of four workers, in both directions and not, and weights that change.
WEIGHTS = np.array(
    [
        [0.5, 0.3, 0.2, 0.0],
        [0.3, 0.4, 0.1, 0.2],
        [0.2, 0.1, 0.45, 0.25],
        [0.0, 0.2, 0.25, 0.55],
    ]
)
ONE_WAY = np.array(
    [
        [0.4, 0.6, 0.0, 0.0],
        [0.1, 0.2, 0.7, 0.0],
        [0.0, 0.2, 0.0, 0.8],
        [0.5, 0.0, 0.3, 0.2],
    ]
)
# Only the columns add up to 1: what each worker gives away.
COLUMNS = np.array(
    [
        [[0.5, 0.0, 0.0, 0.3], [0.5, 0.2, 0, 0], [0, 0.6, 1, 0.3], [0, 0.2, 0, 0.4]],
        [[0.9, 0.5, 0, 0], [0.1, 0.5, 0, 0], [0, 0, 0.5, 0.3], [0, 0, 0.5, 0.7]],
    ]
)
CHANGING = np.stack([ONE_WAY, WEIGHTS, ONE_WAY.T])
EDGES = [(0, 1), (1, 2), (3, 1)]


def neighbours(topology, workers):
    """The pairs of workers that a named graph joins."""
    if topology == "ring":
        return [(i, (i + 1) % workers) for i in range(workers)]
    if topology == "star":
        return [(0, i) for i in range(1, workers)]
    pairs = [*permutations(range(workers), 2)]
    if topology == "complete":
        return pairs
    if topology == "hypercube":
        return [(i, j) for i, j in pairs if (i ^ j).bit_count() == 1]
    raise KeyError(topology)


def metropolis(pairs, workers):
    """A neighbour weighs 1 / (1 + the larger degree), a worker itself the rest."""
    around = [set() for _ in range(workers)]
    for i, j in pairs:
        if i != j:
            around[i].add(j)
            around[j].add(i)
    weights = np.zeros((workers, workers))
    for i in range(workers):
        for j in around[i]:
            weights[i, j] = 1 / (1 + max(len(around[i]), len(around[j])))
        weights[i, i] = 1 - weights[i].sum()
    return weights


def one_way(shifts, workers):
    """Every worker hears those so far ahead, and all weigh the same."""
    weights = np.eye(workers)
    for i in range(workers):
        for shift in shifts:
            weights[i, (i + shift) % workers] += 1
    return weights / (1 + len(shifts))


def matrix(topology, step, workers):
    """The weights of a step: row i has what worker i takes of each."""
    if isinstance(topology, list):
        return metropolis(topology, workers)
    if not isinstance(topology, str):
        return topology[step % len(topology)] if topology.ndim == 3 else topology
    hops = ceil(log2(workers))
    if topology == "exponential":
        return one_way([2 ** (step % hops)] if hops else [], workers)
    if topology == "static_exponential":
        return one_way([2**k for k in range(hops)], workers)
    return metropolis(neighbours(topology, workers), workers)


def is_named(topology, name):
    """Whether a graph is the one of this name."""
    return isinstance(topology, str) and topology == name


def mixed(values, topology, step=0):
    """W x, of a list of the workers' values."""
    mixed_values = []
    for row in matrix(topology, step, len(values)):
        mixed_values.append(sum(w * x for w, x in zip(row, values, strict=True)))
    return mixed_values
