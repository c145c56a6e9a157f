"""Who talks to whom at a step, where not all do."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import collectives
from syncalgos.collectives import Axis, PyTree
from syncalgos.dtypes import narrow, widen
from syncalgos.keys import common_key

TOPOLOGIES = ("exponential", "ring")
MATCHINGS = 16  # random pairings to draw from: each is compiled


def of_exponential_graph(tree: PyTree, step: Any, axis: Axis) -> PyTree:
    """What worker i + 2^(step mod ⌈log₂ N⌉), modulo N, holds arrives at worker i."""
    hops = math.ceil(math.log2(collectives.size(axis)))
    if not hops:
        return tree
    shifts = [partial(collectives.shift, by=2**k, axis=axis) for k in range(hops)]
    return jax.lax.switch(step % hops, shifts, tree)


def of_random_pair(tree: PyTree, step: Any, seed: int, axis: Axis) -> PyTree:
    """What the worker's partner of this step holds; an odd one out has its own.

    The partners are those of one of at most MATCHINGS random perfect matchings, drawn
    anew at each step.
    """
    workers = collectives.size(axis)
    matchings = sorted({_matching(workers, seed, i) for i in range(MATCHINGS)})
    drawn = jax.random.randint(common_key(seed, step), (), 0, len(matchings))
    return collectives.exchange(tree, matchings, drawn, axis)


def ring_moves(tree: PyTree, axis: Axis) -> PyTree:
    """How far each leaf goes when it is averaged with both neighbours on a ring.

    W x - x, at least in float32, for the matrix W of weights 1/3 for the worker itself
    and each neighbour. Where all have the same it is exactly 0.
    """
    left, right = (collectives.shift(tree, by, axis) for by in (-1, 1))
    # Each by itself: XLA would join the last product of a sum with what it is added to,
    # and round so where the sum is fused, and not where it is not.
    return jax.tree.map(
        lambda x, a, b: (a - x) / 3 + (b - x) / 3, widen(tree), left, right
    )


def mix(tree: PyTree, topology: str, step: Any, axis: Axis) -> PyTree:
    """Averages a tree with the peer, or both neighbours, that it has at a step.

    Leaves that are no floats, such as counts, are kept.
    """
    leaves, form = jax.tree.flatten(tree)
    is_float = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]
    own = [x for x, mixes in zip(leaves, is_float, strict=True) if mixes]
    if topology == "ring":
        moved = jax.tree.map(jnp.add, own, ring_moves(own, axis))
        mixed = iter(narrow(moved, own))
    else:
        peer = of_exponential_graph(own, step, axis)
        mixed = iter([(x + y) / 2 for x, y in zip(own, peer, strict=True)])
    pairs = zip(leaves, is_float, strict=True)
    return form.unflatten([next(mixed) if mixes else x for x, mixes in pairs])


def _matching(workers: int, seed: int, number: int) -> tuple[int, ...]:
    """Each worker's partner."""
    order = np.random.default_rng([seed, number]).permutation(workers)
    half, partner = workers // 2, np.arange(workers)
    partner[order[:half]] = order[half : 2 * half]
    partner[order[half : 2 * half]] = order[:half]
    return tuple(map(int, partner))
