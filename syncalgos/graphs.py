"""Graphs of workers by their names: a new one is a line of EDGES.

Importing this file does not import jax, so the command line knows the names at once.
"""

import math
from collections.abc import Callable


def powers(workers: int) -> list[int]:
    """Returns 1, 2, 4, … below the number of workers."""
    return [2**k for k in range(math.ceil(math.log2(workers)))]


def _ring(workers: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % workers) for i in range(workers)]


def _torus(workers: int) -> list[tuple[int, int]]:
    """The edges of a grid, as square as possible, with opposite ends joined."""
    rows = max(d for d in range(1, math.isqrt(workers) + 1) if workers % d == 0)
    length = workers // rows
    along = [
        (r * length + i, r * length + j) for r in range(rows) for i, j in _ring(length)
    ]
    across = [
        (i * length + c, j * length + c) for c in range(length) for i, j in _ring(rows)
    ]
    return along + across


EDGES: dict[str, Callable[[int], list[tuple[int, int]]]] = {  # N -> pairs of neighbours
    "ring": _ring,
    "torus": _torus,
    "hypercube": lambda n: [(i, i ^ by) for i in range(n) for by in powers(n)],
    "star": lambda n: [(0, i) for i in range(1, n)],
    "complete": lambda n: [(i, j) for i in range(n) for j in range(i)],
}

SYMMETRIC = (*EDGES, "erdos_renyi")
ONE_WAY = ("exponential", "static_exponential")
