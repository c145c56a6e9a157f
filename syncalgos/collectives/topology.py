"""Peers that exchange at a step, in methods without a global mean."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import collectives
from syncalgos.collectives import Axis, PyTree
from syncalgos.dtypes import narrow, on_floats, widen
from syncalgos.keys import common_key

TOPOLOGIES = ("exponential", "ring")

MATCHINGS = 16
"""Random pairings to draw from, each of which is compiled."""


def of_exponential_graph(tree: PyTree, step: Any, axis: Axis) -> PyTree:
    """Returns what worker i + 2^(step mod ⌈log₂ N⌉), modulo N, holds, at worker i.

    Args:
        tree: arrays.
        step: the local step.
        axis: the mapped axis or axes over which the N workers lie.
    """
    hops = math.ceil(math.log2(collectives.size(axis)))
    if not hops:
        return tree
    shifts = [partial(collectives.shift, by=2**k, axis=axis) for k in range(hops)]
    return jax.lax.switch(step % hops, shifts, tree)


def of_random_pair(tree: PyTree, step: Any, seed: int, axis: Axis) -> PyTree:
    """Returns what the worker's partner of this step holds; without one, its own.

    Args:
        tree: arrays.
        step: the local step, at which one of MATCHINGS random matchings is drawn.
        seed: the seed of the matchings and of the draws.
        axis: the mapped axis or axes over which the workers lie.
    """
    # A permutation must be known when the program is compiled: hence so few of them.
    workers = collectives.size(axis)
    matchings = sorted({_matching(workers, seed, i) for i in range(MATCHINGS)})
    drawn = jax.random.randint(common_key(seed, step), (), 0, len(matchings))
    return collectives.exchange(tree, matchings, drawn, axis)


def ring_moves(tree: PyTree, axis: Axis) -> PyTree:
    """Returns the move of each leaf to its average with both neighbours on a ring.

    Args:
        tree: arrays of floats.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        W x - x, at least in float32, for the matrix W of weights 1/3 for the worker
        itself and each neighbour. It is exactly 0 where all hold the same.
    """
    left, right = (collectives.shift(tree, by, axis) for by in (-1, 1))
    # Each quotient by itself: XLA would join the last product of a sum with an addition
    # (fma), and round differently where the sum is fused and where it is not.
    return jax.tree.map(
        lambda x, a, b: (a - x) / 3 + (b - x) / 3, widen(tree), left, right
    )


def mix(tree: PyTree, topology: str, step: Any, axis: Axis) -> PyTree:
    """Averages a tree with the worker's peer at a step, or with both neighbours.

    Args:
        tree: arrays; leaves that are no floats, such as counts, are kept.
        topology: one of TOPOLOGIES.
        step: the local step.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A tree of the same shapes and dtypes.
    """

    def mixed(own):
        if topology == "ring":
            return narrow(jax.tree.map(jnp.add, own, ring_moves(own, axis)), own)
        peer = of_exponential_graph(own, step, axis)
        return [(x + y) / 2 for x, y in zip(own, peer, strict=True)]

    return on_floats(mixed, tree)


def _matching(workers: int, seed: int, number: int) -> tuple[int, ...]:
    """Returns each worker's partner, (workers,); an odd one out is its own."""
    order = np.random.default_rng([seed, number]).permutation(workers)
    half, partner = workers // 2, np.arange(workers)
    partner[order[:half]] = order[half : 2 * half]
    partner[order[half : 2 * half]] = order[:half]
    return tuple(map(int, partner))
