"""Graphs of workers: weights from names, edges or matrices, and spectral gaps.

Weights are (period, N, N): at step t, W[t % period, i, j] is the weight that worker i
gives to worker j's values.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from syncalgos import checks
from syncalgos._calls import suggest_arguments
from syncalgos.graphs import EDGES, ONE_WAY, SYMMETRIC, powers

OFF = 1e-5
"""The largest error of a sum of weights, which should be 1: float32 rounds."""

LONGEST = 64
"""Steps within which a function's weights must repeat: each step is compiled."""


class Graph(NamedTuple):
    """A graph of workers.

    Attributes:
        weights: W, (N, N), or (period, N, N) for a graph that changes; worker i gives
            worker j's values the weight W[i, j].
        gap: 1 minus the second-largest absolute eigenvalue of W, or of the product of
            its matrices over a period.
        degree: the most peers that any worker sends to in a step.
    """

    weights: np.ndarray
    gap: float
    degree: int


@suggest_arguments
def graph(topology: Any, workers: int, *, seed: int = 0) -> Graph:
    """Returns the weights, the spectral gap and the degree of a graph of workers.

    Args:
        topology: the graph, as algorithms take it: a name (the table "Graphs of
            workers" of the guide explains each), a matrix of weights, edges, a sequence
            of matrices, or a function from the step to its matrix. `gasloc` counts its
            syncs as steps.
        workers: N, the number of workers, at least 1.
        seed: the seed of the edges of erdos_renyi.

    Returns:
        A Graph: `weights`, (N, N), or (period, N, N) for a graph that changes; `gap`, 1
        minus the second-largest absolute eigenvalue of the weights, or of their product
        over a period; `degree`, the most peers that any worker sends to in a step.

    Raises:
        ValueError: an unknown name, weights whose columns do not add up to 1, or a
            graph for a different number of workers.

    In the long run, each mixing multiplies the workers' distance from their mean by
    1 - gap. With a gap of 1, all workers get the exact mean; with a gap of 0, some
    never hear from others.

    Example:
        >>> from syncalgos import graph
        >>> for name in ("ring", "hypercube", "complete"):
        ...     found = graph(name, 8)
        ...     print(name, round(found.gap, 3), found.degree)
        ring 0.195 2
        hypercube 0.5 3
        complete 1.0 7
        >>> graph([(0, 1), (1, 2)], 3).weights.round(2).tolist()
        [[0.67, 0.33, 0.0], [0.33, 0.33, 0.33], [0.0, 0.33, 0.67]]
    """
    workers = checks.whole("workers", workers, least=1)
    seed = checks.whole("seed", seed, least=0)
    topology_data = check("graph", topology, columns=True)
    weights = find_weights(topology_data, workers, seed)
    among = np.linalg.multi_dot([*weights[::-1], np.eye(workers)])
    sizes = np.sort(np.abs(np.linalg.eigvals(among)))
    heard = (weights > 0) & ~np.eye(workers, dtype=bool)
    degree = max(heard.sum(1).max(), heard.sum(2).max())
    gap = 1 - float(sizes[-2]) if workers > 1 else 1.0
    return Graph(weights[0] if len(weights) == 1 else weights, gap, int(degree))


def check(
    where: str,
    topology: Any,
    *,
    fixed: bool = False,
    symmetric: bool = False,
    columns: bool = False,
    keeps: bool = False,
) -> str | np.ndarray:
    """Checks a graph as far as possible without the number of workers.

    Args:
        where: the function that was called, for the message.
        topology: a name; a matrix of weights, (N, N); edges, (E, 2) whole numbers; a
            sequence of matrices, (period, N, N); or a function from the step to a
            matrix, which repeats. (2, 2) whole numbers that may be both are refused.
        fixed: whether to refuse graphs that change.
        symmetric: whether to refuse weights that are not symmetric.
        columns: whether only columns, and not rows, must add up to 1.
        keeps: whether to refuse a weight of 0 for a worker's own values.

    Returns:
        The name, edges (E, 2), or weights (period, N, N).

    Raises:
        ValueError: the graph cannot be used.
    """
    if isinstance(topology, str):
        names = SYMMETRIC if symmetric else (*ONE_WAY, *SYMMETRIC)
        return checks.one_of("topology", topology, names)
    label = f"{where}: topology"
    checks.untraced(label, topology)
    if callable(topology):
        topology = _find_period(label, topology)
    try:
        topology_array = np.array(topology)
    except ValueError:  # rows of different lengths
        topology_array = np.asarray(None)
    if topology_array.dtype.kind not in "iuf":
        raise ValueError(
            f"{label} must be a name, a matrix of weights, edges (i, j), a sequence of "
            "matrices, or a function from the step to one, got "
            f"{checks.shown(topology)}"
        )
    if (
        topology_array.ndim == 2
        and topology_array.shape[1] == 2
        and topology_array.dtype.kind in "iu"
    ):
        if (
            topology_array.shape == (2, 2)
            and (topology_array.sum(1) == 1).all()
            and (topology_array >= 0).all()
        ):
            raise ValueError(
                f"{label}: {topology_array.tolist()} may be edges or weights of two "
                "workers: give floats for weights, or edges once, such as [(0, 1)]"
            )
        for i, j in topology_array.tolist():
            if i == j or min(i, j) < 0:
                raise ValueError(
                    f"{label}: an edge joins two workers, numbered from 0, got {(i, j)}"
                )
        return topology_array
    weights = topology_array.astype(np.float64)
    weights = weights[None] if weights.ndim == 2 else weights
    if weights.ndim != 3 or weights.shape[1] != weights.shape[2] or not weights.size:
        raise ValueError(
            f"{label} must be a matrix (workers, workers), or several of them, got "
            f"shape {topology_array.shape}"
        )
    if fixed and len(weights) > 1:
        raise ValueError(f"{label} must not change, got {len(weights)} matrices")
    _check_weights(label, weights, columns, symmetric)
    zeros = np.argwhere(weights.diagonal(0, 1, 2) == 0)
    if keeps and zeros.size:
        worker = zeros[0, 1]
        raise ValueError(
            f"{label}: a worker must keep a share: weight [{worker}, {worker}] is 0"
        )
    return weights


def _find_period(label: str, weights_by_step: Callable[[int], Any]) -> list[np.ndarray]:
    """Returns the matrices of a function of the step until they repeat."""
    matrices = [np.array(weights_by_step(step)) for step in range(2 * LONGEST)]
    for period in range(1, LONGEST + 1):
        if all(map(np.array_equal, matrices, matrices[period:])):
            return matrices[:period]
    raise ValueError(
        f"{label}: weights by the step must repeat within {LONGEST} steps: give the "
        "matrices to take in turn as a sequence"
    )


def _check_weights(
    label: str, weights: np.ndarray, columns: bool, symmetric: bool
) -> None:
    """Refuses weights below 0, of a wrong sum, or that differ in the two directions."""
    sums = [("column", weights.sum(1))]
    sums = sums if columns else [("row", weights.sum(2)), *sums]

    def place(index: np.ndarray) -> str:
        """Returns a weight's or a sum's place, and its matrix if there are several."""
        step, *numbers = index.tolist()
        return f"{numbers} of matrix {step}" if len(weights) > 1 else f"{numbers}"

    for index in np.argwhere(~(weights >= 0))[:1]:
        weight = weights[tuple(index)]
        raise ValueError(
            f"{label}: weight {place(index)} must be at least 0, got {weight:g}"
        )
    for line, totals in sums:
        for index in np.argwhere(~(np.abs(totals - 1) <= OFF))[:1]:
            total = totals[tuple(index)]
            raise ValueError(
                f"{label}: {line} {place(index)} adds up to {total:g}, not 1"
            )
    asymmetric = np.argwhere(np.abs(weights - weights.swapaxes(1, 2)) > OFF)
    if symmetric and len(asymmetric):
        step, i, j = asymmetric[0].tolist()
        raise ValueError(
            f"{label} must be symmetric: weight [{i}, {j}] is {weights[step, i, j]:g}, "
            f"but [{j}, {i}] is {weights[step, j, i]:g}"
        )


def find_weights(topology: str | np.ndarray, workers: int, seed: int = 0) -> np.ndarray:
    """Returns the weights of a graph of N workers, (period, N, N).

    Args:
        given: the graph, as `check` returned it.
        workers: N.
        seed: the seed of the edges of erdos_renyi.

    Raises:
        ValueError: the graph is for another number of workers.
    """
    if not isinstance(topology, str) and topology.ndim == 3:
        if topology.shape[1] != workers:
            raise ValueError(
                f"topology: the weights are for {topology.shape[1]} workers, but there "
                f"are {workers}"
            )
        return topology
    if not isinstance(topology, str):
        if topology.size and topology.max() >= workers:
            raise ValueError(
                f"topology: an edge goes to worker {topology.max()}, but the last of "
                f"{workers} is {workers - 1}"
            )
        return _metropolis(_find_neighbours(topology, workers))[None]
    if topology == "exponential":
        return np.stack(
            [_weigh_shifts([distance], workers) for distance in powers(workers) or [0]]
        )
    if topology == "static_exponential":
        return _weigh_shifts(powers(workers), workers)[None]
    if topology == "erdos_renyi":
        return _metropolis(_erdos_renyi(workers, seed))[None]
    if topology == "hypercube" and workers & (workers - 1):
        raise ValueError(
            f"topology: a hypercube has 2, 4, 8, … workers, but there are {workers}"
        )
    edges = np.array(EDGES[topology](workers), int).reshape(-1, 2)
    return _metropolis(_find_neighbours(edges, workers))[None]


def has_name(topology: str | np.ndarray, name: str) -> bool:
    """Whether a graph, as `check` returned it, was given by this name."""
    return isinstance(topology, str) and topology == name


def changes(topology: str | np.ndarray) -> bool:
    """Whether a graph, as `check` returned it, has other links at other steps."""
    several = not isinstance(topology, str) and topology.ndim == 3 and len(topology) > 1
    return several or has_name(topology, "exponential")


def _weigh_shifts(shifts: list[int], workers: int) -> np.ndarray:
    """The weights if each worker hears those ahead by `shifts`, all weighing alike."""
    identity = np.eye(workers)
    return sum((np.roll(identity, distance, 1) for distance in shifts), identity) / (
        1 + len(shifts)
    )


def _find_neighbours(edges: np.ndarray, workers: int) -> np.ndarray:
    """Pairs of neighbours, (N, N) booleans; no worker is its own neighbour."""
    joined = np.zeros((workers, workers), bool)
    joined[edges[:, 0], edges[:, 1]] = joined[edges[:, 1], edges[:, 0]] = True
    return joined & ~np.eye(workers, dtype=bool)


def _erdos_renyi(workers: int, seed: int, attempt: int = 0) -> np.ndarray:
    """Neighbours by chance, 2 ln N / N each, drawn until all workers are connected."""
    chance = min(1.0, 2 * math.log(workers) / workers)
    rng = np.random.default_rng([seed, attempt])
    above = np.triu(rng.random((workers, workers)) < chance, 1)
    joined = above | above.T
    reached = joined | np.eye(workers, dtype=bool)
    for _ in powers(workers):
        reached = reached @ reached
    return joined if reached.all() else _erdos_renyi(workers, seed, attempt + 1)


def _metropolis(joined: np.ndarray) -> np.ndarray:
    """Metropolis-Hastings weights: 1 / (1 + the larger degree) for each neighbour."""
    degree = joined.sum(1)
    weights = joined / (1 + np.maximum.outer(degree, degree))
    return weights + np.diag(1 - weights.sum(1))
