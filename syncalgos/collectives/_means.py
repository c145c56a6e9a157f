"""Means over the workers, and over groups of them."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from syncalgos._dtypes import PyTree, narrow, on_floats, widen
from syncalgos.collectives import _peer_collectives
from syncalgos.collectives._axes import (
    WORKERS,
    Axis,
    find_names,
    index,
    over_peers,
    platform,
    several,
    size,
)
from syncalgos.collectives._marks import marked
from syncalgos.collectives._messages import crosses, summed
from syncalgos.collectives._moves import gather
from syncalgos.collectives._shares import no_mean, noted_share, times_share

SUMMED = 2**18
"""The total of numbers in all lanes above which a loop sums lanes faster."""


@marked
def mean(tree: PyTree, axis: Axis = WORKERS, share: jax.Array | None = None) -> PyTree:
    """Returns the mean over the workers of every leaf, with one all-reduce per leaf.

    Args:
        tree: arrays. Leaves that are not floats, such as counts and random keys, have
            no mean: each worker keeps its own.
        axis: the mapped axis or axes over which the workers lie.
        share: this worker's N w / Σw for weights w, a scalar: the mean is the weighted
            one, and leaves out what a worker of share 0 holds, such as NaN. None: all
            count alike.

    Returns:
        A tree of the same shapes and dtypes. Floats of less than 32 bits are added in
        float32 over the lanes of a device, divided, and then rounded; between devices
        these quotients are sent and added. With a share they are sent in float32.
    """
    workers = size(axis)

    def mean_of_floats(leaves: list[jax.Array]) -> list[jax.Array]:
        if share is None:
            return _total(leaves, axis, workers)
        # In float32: the product of a float16 and a worker's share may overflow.
        weighted = times_share(widen(leaves), share)
        return narrow(_total(weighted, axis, workers), leaves)

    return on_floats(mean_of_floats, tree)


@over_peers(_peer_collectives.total)
def _total(leaves: list[jax.Array], axis: Axis, over: int = 1) -> list[jax.Array]:
    """Returns the sum over the workers of every leaf, divided by a number."""
    names = find_names(axis)
    outer = names[:-1]
    lane = names[-1]
    sums = leaves
    short = [widen(x).dtype != x.dtype for x in leaves]
    if outer and _worth_a_loop(leaves, lane):
        sums = _sum_over_lanes(lane, leaves)
        names = outer
    elif outer and (any(short) or crosses(outer)):
        # If it crosses, before they are joined: XLA merges a leaf's sum over lanes with
        # its all-reduce into one sum, which then has the order of a single process.
        sums = [_lane_sum(x, lane) for x in leaves]
        names = outer

    # A sum of short floats may overflow where the mean does not, and would be rounded
    # twice. So it is divided first, in float32, as DDP does.
    triples = zip(sums, leaves, short, strict=True)
    names = several(names)
    sums = [narrow(widen(x) / over, like) if s else x for x, like, s in triples]
    sums = summed(sums, names) if names else sums
    return [x if s else x / over for x, s in zip(sums, short, strict=True)]


def _lane_sum(x: jax.Array, lane: str) -> jax.Array:
    """Returns the sum over lanes, at least float32, which sends nothing."""
    return lax.psum(widen(x), lane) if lax.axis_size(lane) > 1 else widen(x)


def _worth_a_loop(leaves: list[jax.Array], lane: str) -> bool:
    """Whether additions in a loop are faster than psum over lanes."""
    lanes = lax.axis_size(lane)
    numbers = sum(x.size for x in leaves)
    return lanes > 1 and platform() == "cpu" and lanes * numbers > SUMMED


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sum_over_lanes(lane: str, leaves: list[jax.Array]) -> list[jax.Array]:
    """Returns psum over lanes, at least float32, computed by additions in a loop."""
    # XLA on CPU turns psum under vmap into a reduction over the leading axis. For
    # 269,322 floats and 4, 32 and 128 lanes it takes 5.5, 46 and 231 ms; the loop
    # takes 0.4, 3.5 and 20 ms.
    every = [lax.all_gather(x, lane) for x in leaves]

    def of_lane(i):  # in float32: a bfloat16 sum of ones would stop at 256
        return widen([x[i] for x in every])

    def add(i, sums):
        return [total + x for total, x in zip(sums, of_lane(i), strict=True)]

    return lax.fori_loop(1, lax.axis_size(lane), add, of_lane(0))


# Its derivative is that of psum.
@_sum_over_lanes.defjvp
def _(lane, primals, tangents):
    tangents = [lax.psum(x, lane) for x in widen(tangents[0])]
    return _sum_over_lanes(lane, *primals), tangents


@marked
def group_mean(tree: PyTree, groups: int, axis: Axis = WORKERS) -> PyTree:
    """Returns the mean of every leaf over this worker's group.

    Args:
        tree: arrays.
        groups: the number of groups; each holds equally many consecutive workers.
        axis: the mapped axis or axes over which the workers lie.

    A device averages its own lanes, and communicates with the devices of its group.
    Along a single axis, with more than one group, every worker gathers from all.

    Raises:
        ValueError: the workers do not divide into that many groups.
    """
    workers = size(axis)
    if workers % groups:
        raise ValueError(f"{workers} workers do not divide into {groups} groups")
    if groups == 1:
        return mean(tree, axis)
    no_mean("a mean of groups")
    return _mean_of_group(tree, groups, axis)


@over_peers(_peer_collectives.mean_of_group)
def _mean_of_group(tree: PyTree, groups: int, axis: Axis) -> PyTree:
    """`group_mean`, for at least two groups that divide the workers."""
    workers = size(axis)
    outer = find_names(axis)[:-1]
    lane = find_names(axis)[-1]
    lanes = lax.axis_size(lane)
    members = workers // groups
    mine = index(axis) // members
    looped = _worth_a_loop([*map(jnp.asarray, jax.tree.leaves(tree))], lane)

    def over_devices(x: jax.Array, like: jax.Array) -> jax.Array:
        devices_each = members // lanes
        devices = workers // lanes
        grouped = [
            list(range(i, i + devices_each)) for i in range(0, devices, devices_each)
        ]
        if like.dtype != x.dtype:  # as in `_total`
            part = narrow(x / members, like)
            return lax.psum(part, outer, axis_index_groups=grouped)
        return lax.psum(x / lanes, outer, axis_index_groups=grouped) / devices_each

    def leaf(x: jax.Array) -> jax.Array:
        # A group is consecutive workers, not the lanes of a device: otherwise the
        # numbers would depend on the layout.
        if members % lanes == 0:  # a group is some whole devices
            total = _sum_over_lanes(lane, [x])[0] if looped else _lane_sum(x, lane)
            try:
                return total / lanes if members == lanes else over_devices(total, x)
            except NotImplementedError:  # vmap has no groups along an outer axis
                pass
        elif lanes % members == 0:  # a device is some whole groups
            of_lanes = widen(lax.all_gather(x, lane))
            of_groups = of_lanes.reshape(lanes // members, members, *x.shape)
            return of_groups.mean(1)[lax.axis_index(lane) // members]
        every = widen(gather(x, axis)).reshape(groups, members, *x.shape)
        return every.mean(1)[mine]

    return on_floats(lambda xs: narrow([leaf(x) for x in xs], xs), tree)


@marked
def agreed(
    tree: PyTree, axis: Axis = WORKERS, share: jax.Array | None = None
) -> PyTree:
    """Returns the mean over the workers; if they agree, exactly the common value.

    Args:
        tree: arrays; leaves that are not floats are kept.
        axis: the mapped axis or axes over which the workers lie.
        share: this worker's share in the mean; see `mean`. None: the share by which
            `participating` weighs the worker, if it does.

    Returns:
        A tree of the same shapes. Each leaf takes two all-reduces.
    """
    if share is None:
        share = noted_share()
    # A plain mean of 3, 5 or 7 equal float32 numbers is an ulp off in 15-50 % of
    # entries. This adds the mean difference from one worker to its value.
    is_other = index(axis) != _first_that_takes_part(share, axis)

    def mean_of_equals(leaves: list[jax.Array]) -> list[jax.Array]:
        masked = [jnp.where(is_other, 0, x) for x in leaves]
        first_values = widen(_total(masked, axis))
        # The difference of two infinities is no number.
        first_values = [jnp.where(jnp.isfinite(x), x, 0) for x in first_values]
        # In float32: the difference of two short floats, or their sum, may overflow.
        differences = jax.tree.map(jnp.subtract, widen(leaves), first_values)
        moved = jax.tree.map(jnp.add, first_values, mean(differences, axis, share))
        return narrow(moved, leaves)

    return on_floats(mean_of_equals, tree)


def _first_that_takes_part(share: jax.Array | None, axis: Axis) -> jax.Array | int:
    """The number of the first worker that is not left out of means."""
    if share is None:
        return 0
    # Another's values, such as NaN, must not reach the mean.
    return jnp.argmax(gather(share > 0, axis))
