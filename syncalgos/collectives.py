"""Collectives over the workers: the only file that calls those of jax.lax.

An `axis` is the name of a mapped axis, or a tuple of names with the outermost first.
"""

# Under pmap or shard_map around vmap, psum and axis_index take a tuple of names;
# all_gather, ppermute and psum_scatter fail on it: those go axis by axis here.

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from syncalgos.dtypes import PyTree as PyTree
from syncalgos.dtypes import narrow, on_floats, widen

Axis = str | tuple[str, ...]

WORKERS: tuple[str, str] = ("devices", "lanes")
"""The axes over which `DataParallel` lays its workers, in row-major order."""

SUMMED = 2**18
"""Numbers in all lanes from which a sum over lanes is worth a loop."""


def _names(axis: Axis) -> tuple[str, ...]:
    """Returns the names of an axis, each of which is mapped here, and usable."""
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in names:
        try:
            place = lax.axis_index(name)
        except NameError:
            where = f"unbound axis name: no axis {name!r} is mapped here"
            if name in WORKERS:
                where += ", as it is by DataParallel: for an axis of your own make the "
                where += "strategy with axis='NAME'"
            raise NameError(where) from None
        if jax.typeof(place).mat.varying:
            raise ValueError(
                "give jax.shard_map check_vma=False: with its check on, jax.grad adds "
                "the gradients of all devices by itself, and no step is local"
            )
    return names


def size(axis: Axis = WORKERS) -> int:
    """Returns the number of workers along the axis, a Python int.

    Raises:
        NameError: no axis of that name is mapped.
        ValueError: a shard_map that was called without check_vma=False.
    """
    return lax.axis_size(_names(axis))


def _several(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of axes with more than one worker."""
    # XLA leaves an all-reduce over one worker in the program, and copies all for it.
    return tuple(name for name in names if lax.axis_size(name) > 1)


def index(axis: Axis = WORKERS) -> jax.Array:
    """Returns this worker's number, an int32 scalar, from 0 in row-major order."""
    names = _several(_names(axis))
    return lax.axis_index(names) if names else jnp.int32(0)


def mean(tree: PyTree, axis: Axis = WORKERS) -> PyTree:
    """Returns the mean over the workers of every leaf: one all-reduce of each.

    Args:
        tree: arrays. Leaves that are no floats, such as counts and random keys, have
            no mean: each worker keeps its own.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A tree of the same shapes and dtypes. Short floats are added in float32 over
        the lanes of a device.
    """
    names = _names(axis)
    return on_floats(lambda xs: [x / size(axis) for x in _total(xs, names)], tree)


def _total(leaves: list[jax.Array], names: tuple[str, ...]) -> list[jax.Array]:
    """Returns the sum over the workers of every leaf."""
    outer, lane = names[:-1], names[-1]
    if outer and _worth_a_loop(leaves, lane):
        leaves, names = _sum_over_lanes(lane, leaves), outer
    elif outer and any(widen(x).dtype != x.dtype for x in leaves):
        leaves, names = [_lane_sum(x, lane) for x in leaves], outer
    names = _several(names)
    return [lax.psum(x, names) for x in leaves] if names else leaves


def _lane_sum(x: jax.Array, lane: str) -> jax.Array:
    """Returns the sum over lanes, which sends nothing."""
    # Wide: vmap would round every sum of two short floats, where an all-reduce of XLA
    # on CPU rounds the last one alone.
    return narrow(lax.psum(widen(x), lane), x)


def _worth_a_loop(leaves: list[jax.Array], lane: str) -> bool:
    """Whether additions in a loop are faster than psum over lanes."""
    lanes, numbers = lax.axis_size(lane), sum(x.size for x in leaves)
    # Of the devices for which the program is made: a compiler may be elsewhere.
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = device.platform if device else jax.default_backend()
    return lanes > 1 and platform == "cpu" and lanes * numbers > SUMMED


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sum_over_lanes(lane: str, leaves: list[jax.Array]) -> list[jax.Array]:
    """Returns psum over lanes, computed by additions in a loop."""
    # XLA on CPU makes of psum under vmap a reduction over the leading axis. Of 269,322
    # floats it takes 5.5, 46 and 231 ms at 4, 32 and 128 lanes; the loop 0.4, 3.5, 20.
    every = [lax.all_gather(x, lane) for x in leaves]

    def of_lane(i):  # wide: in bfloat16 a sum stops at 256 times the same number
        return widen([x[i] for x in every])

    def add(i, sums):
        return [total + x for total, x in zip(sums, of_lane(i), strict=True)]

    sums = lax.fori_loop(1, lax.axis_size(lane), add, of_lane(0))
    return narrow(sums, leaves)


# Its derivative is that of psum.
@_sum_over_lanes.defjvp
def _(lane, primals, tangents):
    tangents = [lax.psum(x, lane) for x in tangents[0]]
    return _sum_over_lanes(lane, *primals), tangents


def group_mean(tree: PyTree, groups: int, axis: Axis = WORKERS) -> PyTree:
    """Returns the mean of every leaf over this worker's group.

    Args:
        tree: arrays.
        groups: the number of groups, each of as many consecutive workers.
        axis: the mapped axis or axes over which the workers lie.

    Lanes of a device are averaged there; devices communicate within their group. Along
    a single axis, with more than one group, every worker gathers from all.

    Raises:
        ValueError: a number of groups that does not divide the workers.
    """
    workers = size(axis)
    if workers % groups:
        raise ValueError(f"{workers} workers do not divide into {groups} groups")
    if groups == 1:
        return mean(tree, axis)
    outer, lane = _names(axis)[:-1], _names(axis)[-1]
    lanes, members = lax.axis_size(lane), workers // groups
    mine = index(axis) // members
    looped = _worth_a_loop([*map(jnp.asarray, jax.tree.leaves(tree))], lane)

    def over_devices(x: jax.Array, per_group: int) -> jax.Array:
        if per_group == 1:
            return x
        devices = workers // lanes
        numbers = [list(range(i, i + per_group)) for i in range(0, devices, per_group)]
        grouped = numbers if len(numbers) > 1 else None
        return lax.psum(x, outer, axis_index_groups=grouped) / per_group

    def leaf(x: jax.Array) -> jax.Array:
        # Consecutive workers, and not the lanes of a device, are a group: else the
        # numbers would depend on the layout.
        if members % lanes == 0:  # a group is some whole devices
            total = _sum_over_lanes(lane, [x])[0] if looped else _lane_sum(x, lane)
            return over_devices(total / lanes, members // lanes)
        if lanes % members == 0:  # a device is some whole groups
            of_lanes = lax.all_gather(x, lane)
            of_groups = of_lanes.reshape(lanes // members, members, *x.shape)
            return of_groups.mean(1)[lax.axis_index(lane) // members]
        return gather(x, axis).reshape(groups, members, *x.shape).mean(1)[mine]

    return jax.tree.map(leaf, tree)


def gather(tree: PyTree, axis: Axis = WORKERS) -> PyTree:
    """Gathers every worker's leaves: a leaf of shape S becomes (workers, *S)."""

    def leaf_gather(x: Any) -> jax.Array:
        part, rows = jnp.shape(x), 1
        if len(part) == 1:
            # XLA for TPUs makes of a gather of flat arrays that do not fill tiles an
            # all-reduce, which sends twice as much (libtpu 0.0.52).
            rows = next((n for n in range(2, 64) if part[0] % n == 0), 1)
        x = jnp.reshape(x, part if rows == 1 else (rows, part[0] // rows))
        for name in reversed(_names(axis)):  # (lanes, *S), then (devices, lanes, *S)
            x = lax.all_gather(x, name)
        return jnp.reshape(x, (size(axis), *part))

    return jax.tree.map(leaf_gather, tree)


def shift(tree: PyTree, by: int, axis: Axis = WORKERS) -> PyTree:
    """Shifts leaves around a ring: worker i receives those of worker i + by.

    Args:
        tree: arrays.
        by: workers, modulo their number; known when the program is traced.
        axis: the mapped axis or axes over which the workers lie.
    """
    # Axes of one worker would have XLA for TPUs all-reduce gradients within workers.
    by, names = by % size(axis), _several(_names(axis))
    return jax.tree.map(lambda x: _shift(jnp.asarray(x), by, names) if by else x, tree)


def _shift(x: jax.Array, by: int, names: tuple[str, ...]) -> jax.Array:
    """`shift`, for one leaf: at most two permutations of devices."""
    outer, name = names[:-1], names[-1]
    n = lax.axis_size(name)
    if not outer:
        to_and_from = [((i + by) % n, i) for i in range(n)]
        return lax.ppermute(x, name, to_and_from) if by % n else x
    # Lane l of device d reads lane l + rest of device d + hops, or of the one after it
    # where that passes the last lane: each device sends each of its lanes once.
    hops, rest = divmod(by, n)
    lanes = lax.all_gather(x, name)  # (lanes, *shape), the same for all lanes
    arrived = _shift(lanes[rest:], hops, outer)
    if rest:
        arrived = jnp.concatenate([arrived, _shift(lanes[:rest], hops + 1, outer)])
    return arrived[lax.axis_index(name)]


def exchange(
    tree: PyTree,
    sources: Sequence[Sequence[int]],
    chosen: Any = 0,
    axis: Axis = WORKERS,
) -> PyTree:
    """Permutes leaves: worker i receives those of worker sources[chosen][i].

    Args:
        tree: arrays.
        sources: permutations of the workers' numbers, known when the program is traced.
        chosen: the number of one of them, the same on all workers.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A tree of the same shapes. Over several lanes on several devices each worker
        gathers from all.
    """
    # Over two axes a permutation of pairs has no shorter way than to gather all.
    names = [*_several(_names(axis))]
    if len(names) > 1:
        mine = jnp.asarray(sources)[chosen, index(axis)]
        return jax.tree.map(lambda x: gather(x, axis)[mine], tree)

    def permute(pairs: list[tuple[int, int]]) -> PyTree:
        return jax.tree.map(lambda x: lax.ppermute(x, names[0], pairs), tree)

    if not names:
        return tree
    permutations = [
        functools.partial(permute, [(source, i) for i, source in enumerate(row)])
        for row in sources
    ]
    return lax.switch(chosen, permutations)


def all_to_all(tree: PyTree, axis: Axis = WORKERS) -> PyTree:
    """Transposes rows, (workers, *S): row j of worker i becomes row i of worker j."""
    names = _names(axis)

    def leaf(x: jax.Array) -> jax.Array:
        shape = x.shape
        x = x.reshape(*(lax.axis_size(name) for name in names), *shape[1:])
        for i, name in enumerate(names):
            # vmap's rule fails on an array that is not mapped: adding 0 maps it.
            mapped = x + 0 * lax.axis_index(name).astype(x.dtype)
            x = lax.all_to_all(mapped, name, i, i, tiled=True)
        return x.reshape(shape)

    return jax.tree.map(leaf, tree)


def agreed(tree: PyTree, axis: Axis = WORKERS) -> PyTree:
    """Returns the mean over the workers: bit for bit the common value if they agree.

    Args:
        tree: arrays of floats.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A tree of the same shapes. It takes two all-reduces of each leaf.
    """
    # A plain mean of 3, 5 or 7 equal float32 numbers is an ulp off in 15-50 % of
    # entries: hence the first worker's value plus the mean difference from it.
    form = jax.tree.structure(tree)
    only = [jnp.where(index(axis), 0, x) for x in jax.tree.leaves(tree)]
    first = form.unflatten(_total(only, _names(axis)))
    offset = mean(jax.tree.map(jnp.subtract, tree, first), axis)
    return jax.tree.map(jnp.add, first, offset)
