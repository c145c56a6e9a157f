"""Permutations by which workers hear their peers: as few as the largest degree."""

from typing import NamedTuple

import numpy as np

from syncalgos.collectives._graphs import named, weights_of


class Link(NamedTuple):
    """A permutation of the workers, in which each worker hears one other.

    Attributes:
        sources: the worker that each worker hears, (N,); itself if it hears nobody.
        weights: the weight of that worker's values, (N,); 0 if it hears nobody.
        constant: whether the weights are constants in programs, as those of a ring.
    """

    sources: np.ndarray
    weights: np.ndarray
    constant: bool = False


def links_of(given: str | np.ndarray, workers: int) -> list[list[Link]]:
    """Returns the links of each step of a period.

    Args:
        given: the graph, as `graphs.check` returned it.
        workers: N, the number of workers.

    Raises:
        ValueError: the graph is for another number of workers.
    """
    found = [_links(weights) for weights in weights_of(given, workers)]
    if not named(given, "ring"):
        return found
    return [[link._replace(constant=True) for link in found[0]]]


def _links(weights: np.ndarray) -> list[Link]:
    """Splits the weights of other workers into links, as many as the largest degree."""
    workers = len(weights)
    everyone = np.arange(workers)
    left = np.where(np.eye(workers), 0, weights)
    found = []

    def take(sources):
        found.append(Link(sources, left[everyone, sources]))
        left[everyone, sources] = 0  # a pair that only completes a permutation: 0

    # Shifts first: over several lanes on several devices, other permutations gather
    # from all workers. Each shift reduces the degree of every worker by one.
    for by in range(1, workers):
        sources = (everyone - by) % workers
        if (left[everyone, sources] > 0).all():
            take(sources)
    for sources in _colored(left > 0):
        take(sources)
    return found


def _colored(heard: np.ndarray) -> list[np.ndarray]:
    """Splits pairs (hearer, source) into as few permutations as the largest degree.

    Args:
        heard: (N, N) booleans.

    A bipartite graph has an edge coloring with as many colors as its largest degree
    (König). Each pair takes a color that is free at both ends. If there is none, two
    colors are exchanged on a path from one end; the path never reaches the other end.
    """
    workers = len(heard)
    ins, outs = heard.sum(1), heard.sum(0)
    colors = int(max(ins.max(), outs.max()))
    hears = np.full((workers, colors), -1)  # by hearer and color
    told = np.full((workers, colors), -1)  # by source and color
    # Idle workers hear themselves, so that nothing is sent for them.
    idle = np.repeat(np.arange(workers), colors - np.maximum(ins, outs))
    pairs = [*np.argwhere(heard).tolist(), *np.stack([idle, idle], 1).tolist()]
    for hearer, source in pairs:
        one = int(np.argmin(hears[hearer]))
        other = int(np.argmin(told[source]))
        if told[source, one] >= 0:
            _swap(hears, told, source, one, other)
        hears[hearer, one], told[source, one] = source, hearer
    for color in range(colors):
        hearers, sources = (np.flatnonzero(x[:, color] < 0) for x in (hears, told))
        hears[hearers, color] = sources
    return [*hears.T.copy()]


def _swap(
    hears: np.ndarray, told: np.ndarray, source: int, one: int, other: int
) -> None:
    """Exchanges two colors on the path from a source, where `other` is free."""
    path = []  # with the new colors
    while (hearer := told[source, one]) >= 0:
        path.append((hearer, source, other))
        if (following := hears[hearer, other]) < 0:
            break
        source = following
        path.append((hearer, source, one))
    for hearer, source, color in path:
        before = one + other - color
        hears[hearer, before] = told[source, before] = -1
    for hearer, source, color in path:
        hears[hearer, color], told[source, color] = source, hearer
