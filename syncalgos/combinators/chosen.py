"""Means of entries that each worker chooses, in messages of the length needed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from syncalgos import collectives
from syncalgos.collectives import Axis, PyTree
from syncalgos.combinators.decided import Decision, branch
from syncalgos.reducers.hops import index_dtype
from syncalgos.reducers.stacking import shards

UNITS = 1024
"""The number of units in a vector; the length of a message is rounded up to units."""


def undecided(size: int) -> tuple[Decision, ...]:
    """Returns the first decisions of `mean_of_chosen`, for at most `size` entries."""
    return (Decision(jnp.int32(-1)),) * (1 + min(size, UNITS).bit_length())


def mean_of_chosen(
    tree: PyTree,
    chosen: PyTree,
    decisions: tuple[Decision, ...],
    step: Any,
    axis: Axis,
) -> tuple[PyTree, tuple[Decision, ...]]:
    """Returns the mean over the workers of a tree's chosen entries; others are 0.

    Every worker first gathers how many entries the others chose. All then send values
    and indices of as many entries as the worker that chose most, rounded up to units.
    If that takes more bytes than an all-reduce of all entries, they all-reduce instead.
    If a worker is several devices, each sends the entries that it holds, and the device
    that holds most decides.

    Args:
        tree: this worker's arrays; all leaves count as one vector.
        chosen: the entries to send, booleans of the same shapes.
        decisions: the decisions of the last step; see `undecided`.
        step: the local step.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        The mean, identical on all workers, and the decisions: whether the whole vector
        is sent, and the binary digits of the number of units, the lowest first.
    """

    def mean(within, tree, chosen, decisions, step):
        x, shaped = ravel_pytree(tree)
        flags, _ = ravel_pytree(chosen)
        found, decided = _mean(x, flags, decisions, step, axis, within)
        return shaped(found), decided

    return shards.by_device(mean, (tree, chosen), decisions, step)


def _mean(
    x: jax.Array,
    chosen: jax.Array,
    decisions: tuple[Decision, ...],
    step: Any,
    axis: Axis,
    within: tuple[str, ...],
) -> tuple[jax.Array, tuple[Decision, ...]]:
    """`mean_of_chosen`, for a device's vector and the axes within a worker."""
    unit, workers = max(-(-x.size // UNITS), 1), collectives.size(axis)
    kind, whole = index_dtype(x.size + 1), x.dtype.itemsize
    most = jnp.sum(chosen, dtype=jnp.int32)
    if within:
        most = jnp.max(collectives.gather(most, within))
    most = jnp.max(collectives.gather(most, axis))
    needed = (most + unit - 1) // unit
    # (N-1) times values and indices, or 2 (N-1)/N times the vector.
    entry = whole + jnp.dtype(kind).itemsize
    is_whole = needed > 2 * whole * x.size // (workers * unit * entry)
    mean, first = branch(
        is_whole,
        decisions[0],
        step,
        lambda: collectives.mean(jnp.where(chosen, x, 0), axis),
        lambda: jnp.zeros_like(x),
    )
    # Shapes must be known, so each binary digit has a branch that sends its share of
    # the places. Places after the last chosen one lie outside the vector: dropped.
    size = unit * -(-x.size // unit)
    [places] = jnp.nonzero(chosen, size=size, fill_value=x.size)
    decided, begin = [first], jnp.int32(0)
    for digit, decision in enumerate(decisions[1:]):
        length = min(unit << digit, size)  # shorter only in branches never taken

        def add(mean=mean, begin=begin, length=length):
            own = lax.dynamic_slice(places, [begin], [length])
            values = x.at[own].get(mode="fill", fill_value=0)
            arrived, values = collectives.gather((own.astype(kind), values), axis)
            return mean.at[arrived].add(values / workers, mode="drop")

        asked = ~is_whole & (needed >> digit & 1 == 1)
        mean, decision = branch(asked, decision, step, add, lambda mean=mean: mean)
        begin = begin + jnp.where(asked, length, 0)
        decided.append(decision)
    return mean, tuple(decided)
