"""Means of the entries that each worker chooses, in messages as long as needed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from syncalgos import collectives
from syncalgos.collectives import Axis
from syncalgos.combinators.decided import Decision, branch
from syncalgos.reducers.hops import index_dtype

UNITS = 1024
"""Messages are so many parts of a vector long, rounded up."""


def _units(size: int) -> tuple[int, int]:
    """Returns the entries of a unit, and the units of a vector."""
    unit = max(-(-size // UNITS), 1)
    return unit, -(-size // unit)


def undecided(size: int) -> tuple[Decision, ...]:
    """Returns the first decisions of `mean_of_chosen`, for a vector of that size."""
    _, units = _units(size)
    return (Decision(jnp.int32(-1)),) * (1 + units.bit_length())


def mean_of_chosen(
    x: jax.Array,
    chosen: jax.Array,
    decisions: tuple[Decision, ...],
    step: Any,
    axis: Axis,
) -> tuple[jax.Array, tuple[Decision, ...]]:
    """Returns the mean over the workers of a vector's chosen entries; others are 0.

    Every worker gathers how many entries the others chose. All send as many as the
    worker with most of them, rounded up to units, as values and indices. Where these
    take more bytes than an all-reduce of the vector, that is made instead.

    Args:
        x: this worker's vector, (size,).
        chosen: its entries to send, (size,) booleans.
        decisions: those of the last step; see `undecided`.
        step: the local step.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        The mean, identical on all workers; and the decisions: whether the vector is
        sent whole, and the binary digits of the number of units, from the lowest.
    """
    (unit, units), workers = _units(x.size), collectives.size(axis)
    kind, whole = index_dtype(x.size + 1), x.dtype.itemsize
    most = jnp.max(collectives.gather(jnp.sum(chosen, dtype=jnp.int32), axis))
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
    # Shapes must be known: hence a branch for each digit, which takes its share of the
    # places. Those behind the last are beyond the vector, and dropped.
    [places] = jnp.nonzero(chosen, size=unit * units, fill_value=x.size)
    decided, begin = [first], jnp.int32(0)
    for digit, decision in enumerate(decisions[1:]):
        length = unit << digit

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
