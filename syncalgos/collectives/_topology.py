"""Exchanges with peers at a step, for methods without a global mean."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import collectives
from syncalgos._dtypes import narrow, on_floats, widen
from syncalgos._keys import common_key
from syncalgos.collectives import Axis, PyTree
from syncalgos.collectives._axes import same_on_all
from syncalgos.collectives._graphs import check as check
from syncalgos.collectives._graphs import has_name as has_name
from syncalgos.collectives._matchings import Link, find_links

Topology = str | np.ndarray
"""A graph as `check` returns it."""

MATCHINGS = 16
"""The number of random pairings to draw from; each is compiled."""


def of_random_pair(tree: PyTree, step: Any, seed: int, axis: Axis) -> PyTree:
    """Returns the tree of the worker's partner at this step; its own without one.

    Args:
        tree: arrays.
        step: the local step; at each, one of MATCHINGS random matchings is drawn.
        seed: the seed of the matchings and of the draws.
        axis: the mapped axis or axes over which the workers lie.
    """
    # A permutation must be known when the program is compiled, so there are only a few.
    workers = collectives.size(axis)
    matchings = sorted({_matching(workers, seed, i) for i in range(MATCHINGS)})
    drawn = jax.random.randint(common_key(seed, step), (), 0, len(matchings))
    return collectives.exchange(tree, matchings, drawn, axis)


def links(topology: Topology, axis: Axis) -> list[list[Link]]:
    """Returns the links of each step of a period.

    Args:
        topology: the graph, as `check` returned it.
        axis: the mapped axis or axes over which the workers lie.

    Raises:
        ValueError: the graph is for another number of workers.
    """
    return find_links(topology, collectives.size(axis))


def hear(tree: PyTree, link: Link, axis: Axis) -> PyTree:
    """Returns the tree of the peer that this worker hears by a link."""
    workers = len(link.sources)
    ahead = (link.sources - np.arange(workers)) % workers
    if (ahead == ahead[0]).all():
        return collectives.shift(tree, int(ahead[0]), axis)
    return collectives.exchange(tree, [[*map(int, link.sources)]], 0, axis)


def weigh(link: Link, axis: Axis) -> Callable[[jax.Array], jax.Array]:
    """Returns a function: values of a link -> these times this worker's weight."""
    # Divides by a number that XLA does not know: a known one XLA turns into a product,
    # which it may join with the next addition (fma), so that the rounding depends on
    # fusion. A ring keeps known numbers, so that older runs continue unchanged.
    if link.constant:
        return lambda x: x / float(1 / link.weights[0])
    has_source = link.weights > 0
    divisors = 1 / np.where(has_source, link.weights, 1)
    worker = collectives.index(axis)
    hears = jnp.asarray(has_source)[worker]
    divisor = jnp.asarray(divisors)[worker]
    divisor = jax.lax.optimization_barrier(divisor)
    return lambda x: jnp.where(hears, x / divisor.astype(x.dtype), 0)


def pull(
    own_values: jax.Array, peer_values: list[jax.Array], links: list[Link], axis: Axis
) -> jax.Array:
    """Returns W x - x for one array, from the values of this worker and its peers."""
    differences = [x - own_values for x in peer_values]
    weights = np.array([x.weights for x in links])
    if weights.size and (weights == weights.flat[0]).all():
        return weigh(links[0], axis)(sum(differences[1:], differences[0]))
    pairs = zip(links, differences, strict=True)
    pulls = [weigh(link, axis)(difference) for link, difference in pairs]
    return sum(pulls, jnp.zeros_like(own_values))


def moves(tree: PyTree, topology: Topology, step: Any, axis: Axis) -> PyTree:
    """Returns the move of each leaf to its average with the peers' leaves.

    Args:
        tree: arrays of floats.
        topology: the graph, as `check` returned it.
        step: the local step, which chooses the weights of a graph that changes.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        W x - x for the weights W, at least float32. It is exactly 0 where all workers
        hold the same values.
    """

    def along(step_links: list[Link], tree: PyTree) -> PyTree:
        own_values = widen(tree)
        total = None
        for link in step_links:
            peer_values = hear(tree, link, axis)
            weight = weigh(link, axis)
            pulls = jax.tree.map(
                lambda x, y, weight=weight: weight(y - x), own_values, peer_values
            )
            total = pulls if total is None else jax.tree.map(jnp.add, total, pulls)
        return jax.tree.map(jnp.zeros_like, own_values) if total is None else total

    return _at_step(along, topology, step, axis, tree)


def push(
    tree: PyTree, sends: jax.Array | bool, topology: Topology, step: Any, axis: Axis
) -> PyTree:
    """Gives shares of sums to the worker's peers, and takes the shares they give.

    Args:
        tree: sums, arrays of floats.
        sends: whether this worker gives shares; otherwise it keeps its whole sums.
        topology: the graph, as `check` returned it; only columns must add up to 1.
        step: the local step, which chooses the weights of a graph that changes.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        W x for the weights W. The total of each sum over the workers stays the same.
    """

    def along(step_links: list[Link], tree: PyTree) -> PyTree:
        total = tree
        for link in step_links:
            # The link's weights belong to hearers; source j gives to worker order[j].
            order = np.argsort(link.sources)
            weight = weigh(Link(link.sources, link.weights[order]), axis)
            gives = jax.tree.map(
                lambda x, weight=weight: jnp.where(sends, weight(x), 0), tree
            )
            total = jax.tree.map(take, total, gives, hear(gives, link, axis))
        return total

    def take(total: jax.Array, gives: jax.Array, gets: jax.Array) -> jax.Array:
        # Taking away half of a sum leaves exactly the other half. Otherwise, where all
        # workers hold and give the same, the difference is exactly 0.
        halves = has_name(topology, "exponential")
        return total - gives + gets if halves else total + (gets - gives)

    return _at_step(along, topology, step, axis, tree)


def mix(tree: PyTree, topology: Topology, step: Any, axis: Axis) -> PyTree:
    """Averages a tree with the trees of the worker's peers at a step.

    Args:
        tree: arrays; leaves that are not floats, such as counts, are kept.
        topology: the graph, as `check` returned it.
        step: the local step.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A tree of the same shapes and dtypes.
    """

    # At each step there is one peer; a single worker has none.
    def hear_peer(step_links: list[Link], leaves: PyTree) -> PyTree:
        return hear(leaves, step_links[0], axis) if step_links else leaves

    def mix_floats(leaves: list[jax.Array]) -> list[jax.Array]:
        if has_name(topology, "exponential"):
            peer_leaves = widen(_at_step(hear_peer, topology, step, axis, leaves))
            pairs = zip(widen(leaves), peer_leaves, strict=True)
            # In float32: a short sum may overflow.
            return narrow([(x + y) / 2 for x, y in pairs], leaves)
        pulls = moves(leaves, topology, step, axis)
        return narrow(jax.tree.map(jnp.add, leaves, pulls), leaves)

    return on_floats(mix_floats, tree)


def _at_step(
    along: Callable[[list[Link], PyTree], PyTree],
    topology: Topology,
    step: Any,
    axis: Axis,
    tree: PyTree,
) -> PyTree:
    """Applies a function to the links of a step and a tree."""
    branches = [partial(along, step_links) for step_links in links(topology, axis)]
    if len(branches) == 1:
        return branches[0](tree)
    step = same_on_all(step, axis)
    return jax.lax.switch(step % len(branches), branches, tree)


def _matching(workers: int, seed: int, number: int) -> tuple[int, ...]:
    """Returns each worker's partner, (workers,); a worker left over is its own."""
    order = np.random.default_rng([seed, number]).permutation(workers)
    half = workers // 2
    partner = np.arange(workers)
    partner[order[:half]] = order[half : 2 * half]
    partner[order[half : 2 * half]] = order[:half]
    return tuple(map(int, partner))
