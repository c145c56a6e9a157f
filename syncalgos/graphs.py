"""Graphs of workers by their names: a new one is a line of EDGES.

Importing this file does not import jax, so the command line knows the names at once.
"""

import math
from collections.abc import Callable
from itertools import product


def powers(workers: int) -> list[int]:
    """Returns 1, 2, 4, … below the number of workers."""
    return [2**k for k in range(math.ceil(math.log2(workers)))]


def _ring(workers: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % workers) for i in range(workers)]


def _torus(workers: int) -> list[tuple[int, int]]:
    """The edges of a grid, as square as possible, with opposite ends joined."""
    num_rows = max(d for d in range(1, math.isqrt(workers) + 1) if workers % d == 0)
    num_columns = workers // num_rows
    edges = []
    for row_index in range(num_rows):
        start = row_index * num_columns
        edges += [
            (start + from_index, start + to_index)
            for from_index, to_index in _ring(num_columns)
        ]
    for column_index in range(num_columns):
        edges += [
            (
                from_index * num_columns + column_index,
                to_index * num_columns + column_index,
            )
            for from_index, to_index in _ring(num_rows)
        ]
    return edges


def _hypercube(workers: int) -> list[tuple[int, int]]:
    """The edges between workers whose numbers differ in one bit."""
    bits = powers(workers)
    return [(i, i ^ bit) for i, bit in product(range(workers), bits)]


def _star(workers: int) -> list[tuple[int, int]]:
    return [(0, i) for i in range(1, workers)]


def _complete(workers: int) -> list[tuple[int, int]]:
    edges = []
    for i in range(workers):
        edges += [(i, j) for j in range(i)]
    return edges


EDGES: dict[str, Callable[[int], list[tuple[int, int]]]] = {  # N -> pairs of neighbours
    "ring": _ring,
    "torus": _torus,
    "hypercube": _hypercube,
    "star": _star,
    "complete": _complete,
}

SYMMETRIC = (*EDGES, "erdos_renyi")
ONE_WAY = ("exponential", "static_exponential")
