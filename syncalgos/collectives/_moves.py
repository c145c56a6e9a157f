"""Moves of unchanged arrays: gathered, shifted, exchanged and transposed.

No number is computed here, so values arrive bit for bit as they were sent.
"""

# Under pmap or shard_map around vmap, psum and axis_index take a tuple of names, but
# all_gather, ppermute and psum_scatter fail on it: they go axis by axis here.

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from syncalgos._dtypes import PyTree
from syncalgos.collectives import _peer_collectives
from syncalgos.collectives._axes import (
    WORKERS,
    Axis,
    find_names,
    index,
    over_peers,
    same_on_all,
    several,
    size,
)
from syncalgos.collectives._marks import marked
from syncalgos.collectives._messages import moved
from syncalgos.collectives._shares import no_mean


@over_peers(_peer_collectives.gather)
@marked
def gather(tree: PyTree, axis: Axis = WORKERS) -> PyTree:
    """Gathers every worker's leaves: a leaf of shape S becomes (workers, *S).

    Args:
        tree: arrays of any dtypes.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A tree of arrays (workers, *S) in the order of the workers' numbers, identical
        on all workers. Each of N workers sends its leaves N - 1 times.
    """

    names = find_names(axis)
    outermost, *inner_names = names
    leaves, form = jax.tree.flatten(tree)

    def split_into_rows(x: Any) -> jax.Array:
        # XLA for TPUs turns a gather of flat arrays that do not fill tiles into an
        # all-reduce, which sends twice as much (libtpu 0.0.52).
        flat = len(x.shape) == 1
        rows = next((n for n in range(2, 64) if flat and x.size % n == 0), 1)
        return x if rows == 1 else x.reshape(rows, x.size // rows)

    gathered = [split_into_rows(jnp.asarray(x)) for x in leaves]
    for name in reversed(several(inner_names)):  # (lanes, *S)
        gathered = [lax.all_gather(x, name) for x in gathered]
    # (devices, lanes, *S): arrays leave a process along the first axis only.
    gathered = moved(gathered, lambda x: lax.all_gather(x, outermost), [outermost])
    pairs = zip(gathered, leaves, strict=True)
    return form.unflatten([y.reshape(size(axis), *jnp.shape(x)) for y, x in pairs])


@over_peers(_peer_collectives.shift)
@marked
def shift(tree: PyTree, by: int, axis: Axis = WORKERS) -> PyTree:
    """Shifts leaves around a ring: worker i receives those of worker i + by.

    Args:
        tree: arrays.
        by: the distance in workers, modulo their number; a Python int.
        axis: the mapped axis or axes over which the workers lie.
    """
    no_mean("an exchange between single workers")
    # With axes of one worker XLA for TPUs would all-reduce gradients within workers.
    distance = by % size(axis)
    if not distance:
        return tree
    leaves, form = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    return form.unflatten(_shift(leaves, distance, several(find_names(axis))))


def _shift(
    leaves: list[jax.Array], distance: int, names: tuple[str, ...]
) -> list[jax.Array]:
    """`shift`, for leaves: at most two permutations of devices."""
    *outer_names, name = names
    n = lax.axis_size(name)
    if not outer_names:
        sources_and_targets = [((i + distance) % n, i) for i in range(n)]
        return _permuted(leaves, name, sources_and_targets) if distance % n else leaves
    # Lane l of device d reads lane l + lane_distance of device d + device_distance;
    # past the last lane, it reads from the device after that. So each device sends each
    # of its lanes once.
    device_distance, lane_distance = divmod(distance, n)
    lanes = [lax.all_gather(x, name) for x in leaves]  # (lanes, *shape), all alike
    outer = tuple(outer_names)
    arrived = _shift([x[lane_distance:] for x in lanes], device_distance, outer)
    if lane_distance:
        late = _shift([x[:lane_distance] for x in lanes], device_distance + 1, outer)
        arrived = [jnp.concatenate(pair) for pair in zip(arrived, late, strict=True)]
    return [x[lax.axis_index(name)] for x in arrived]


def _permuted(
    leaves: list[jax.Array], name: str, pairs: list[tuple[int, int]]
) -> list[jax.Array]:
    """Sends leaves from the first device of each pair to the second."""
    return moved(leaves, lambda x: lax.ppermute(x, name, pairs), [name])


@over_peers(_peer_collectives.exchange)
@marked
def exchange(
    tree: PyTree,
    sources: Sequence[Sequence[int]],
    chosen: Any = 0,
    axis: Axis = WORKERS,
) -> PyTree:
    """Permutes leaves: worker i receives those of worker sources[chosen][i].

    Args:
        tree: arrays.
        sources: permutations of the workers' numbers, as Python ints.
        chosen: the index of one of them, the same on all workers.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A tree of the same shapes. With several lanes on several devices, each worker
        gathers from all.
    """
    no_mean("an exchange between single workers")
    chosen = same_on_all(chosen, axis)
    # Over two axes, a permutation of workers takes a gather from all.
    names = [*several(find_names(axis))]
    if len(names) > 1:
        mine = jnp.asarray(sources)[chosen, index(axis)]
        return jax.tree.map(lambda x: gather(x, axis)[mine], tree)

    if not names:
        return tree

    def permute(row: Sequence[int]) -> PyTree:
        leaves, form = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
        pairs = [(source, i) for i, source in enumerate(row)]
        return form.unflatten(_permuted(leaves, names[0], pairs))

    return lax.switch(chosen, [functools.partial(permute, row) for row in sources])


@over_peers(_peer_collectives.all_to_all)
@marked
def all_to_all(tree: PyTree, axis: Axis = WORKERS) -> PyTree:
    """Transposes rows, (workers, *S): row j of worker i becomes row i of worker j.

    Args:
        tree: arrays, each with a row for every worker along the first axis.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A tree of the same shapes. Each worker sends all its rows except its own.
    """
    names = find_names(axis)
    sizes = [lax.axis_size(name) for name in names]
    leaves, form = jax.tree.flatten(tree)
    transposed = [x.reshape(*sizes, *x.shape[1:]) for x in leaves]
    for i, name in enumerate(names):
        if sizes[i] == 1:
            continue

        def send(x, i=i, name=name):
            # vmap's rule fails on an array that is not mapped; jnp.where maps it.
            mapped = jnp.where(lax.axis_index(name) >= 0, x, x)
            return lax.all_to_all(mapped, name, i, i, tiled=True)

        # Messages are cut along the first axis only.
        if i == 0:
            transposed = moved(transposed, send, [name], math.prod(sizes[1:]))
        else:
            transposed = [send(x) for x in transposed]
    pairs = zip(transposed, leaves, strict=True)
    return form.unflatten([y.reshape(x.shape) for y, x in pairs])
