"""Permutations by which workers hear their peers: as few as the largest degree."""

from typing import NamedTuple

import numpy as np

from syncalgos.collectives._graphs import find_weights, has_name


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


def find_links(topology: str | np.ndarray, workers: int) -> list[list[Link]]:
    """Returns the links of each step of a period.

    Args:
        given: the graph, as `graphs.check` returned it.
        workers: N, the number of workers.

    Raises:
        ValueError: the graph is for another number of workers.
    """
    period_links = [_links(weights) for weights in find_weights(topology, workers)]
    if not has_name(topology, "ring"):
        return period_links
    return [[link._replace(constant=True) for link in period_links[0]]]


def _links(weights: np.ndarray) -> list[Link]:
    """Splits the weights of other workers into links, as many as the largest degree."""
    workers = len(weights)
    everyone = np.arange(workers)
    unassigned_weights = np.where(np.eye(workers), 0, weights)
    links = []

    def take(sources):
        links.append(Link(sources, unassigned_weights[everyone, sources]))
        unassigned_weights[everyone, sources] = (
            0  # a pair that only completes a permutation: 0
        )

    # Shifts first: over several lanes on several devices, other permutations gather
    # from all workers. Each shift reduces the degree of every worker by one.
    for distance in range(1, workers):
        sources = (everyone - distance) % workers
        if (unassigned_weights[everyone, sources] > 0).all():
            take(sources)
    for sources in _colored(unassigned_weights > 0):
        take(sources)
    return links


def _colored(heard: np.ndarray) -> list[np.ndarray]:
    """Splits pairs (hearer, source) into as few permutations as the largest degree.

    Args:
        heard: (N, N) booleans.

    A bipartite graph has an edge coloring with as many colors as its largest degree
    (König). Each pair takes a color that is free at both ends. If there is none, two
    colors are exchanged on a path from one end; the path never reaches the other end.
    """
    workers = len(heard)
    num_sources = heard.sum(1)
    num_hearers = heard.sum(0)
    colors = int(max(num_sources.max(), num_hearers.max()))
    sources_of_hearers = np.full((workers, colors), -1)
    hearers_of_sources = np.full((workers, colors), -1)
    # Idle workers hear themselves, so that nothing is sent for them.
    idle = np.repeat(np.arange(workers), colors - np.maximum(num_sources, num_hearers))
    pairs = [*np.argwhere(heard).tolist(), *np.stack([idle, idle], 1).tolist()]
    for hearer, source in pairs:
        color = int(np.argmin(sources_of_hearers[hearer]))  # free at the hearer
        if hearers_of_sources[source, color] >= 0:
            free_color = int(np.argmin(hearers_of_sources[source]))
            _exchange_colors(
                sources_of_hearers, hearers_of_sources, source, color, free_color
            )
        sources_of_hearers[hearer, color] = source
        hearers_of_sources[source, color] = hearer
    for color in range(colors):
        hearers = np.flatnonzero(sources_of_hearers[:, color] < 0)
        sources = np.flatnonzero(hearers_of_sources[:, color] < 0)
        sources_of_hearers[hearers, color] = sources
    return [*sources_of_hearers.T.copy()]


def _exchange_colors(
    sources_of_hearers: np.ndarray,
    hearers_of_sources: np.ndarray,
    source: int,
    color: int,
    free_color: int,
) -> None:
    """Exchanges two colors on the path from a source, so that `color` is free there.

    Args:
        sources_of_hearers: by hearer and color, the source; -1 for none. Changed.
        hearers_of_sources: by source and color, the hearer; -1 for none. Changed.
        source: where the path begins.
        color: a color that is in use at the source.
        free_color: a color that is free at the source.
    """
    recolored = []  # (hearer, source, new color)
    hearer = hearers_of_sources[source, color]
    while hearer >= 0:
        recolored.append((hearer, source, free_color))
        next_source = sources_of_hearers[hearer, free_color]
        if next_source < 0:
            break
        source = next_source
        recolored.append((hearer, source, color))
        hearer = hearers_of_sources[source, color]
    for hearer, source, new_color in recolored:
        old_color = color + free_color - new_color
        sources_of_hearers[hearer, old_color] = -1
        hearers_of_sources[source, old_color] = -1
    for hearer, source, new_color in recolored:
        sources_of_hearers[hearer, new_color] = source
        hearers_of_sources[source, new_color] = hearer
