"""The collectives over processes of a transport, as NumPy arrays on the host.

A mean is a sum of the transport's; all else moves bytes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos._dtypes import PyTree, narrow, on_floats, widen
from syncalgos.collectives._messages import buckets
from syncalgos.collectives._peers import HostFunction, Peers, call_on_host
from syncalgos.collectives._shares import no_mean

Arrays = list[np.ndarray]


def total(leaves: list[jax.Array], axis: Peers, over: int = 1) -> list[jax.Array]:
    """Returns the sum over the processes of every leaf, divided by a number."""
    # As between devices, short floats are divided before they are added and rounded.
    is_short = [widen(x).dtype != x.dtype for x in leaves]
    operands = [
        narrow(widen(x) / over, x) if short else x
        for x, short in zip(leaves, is_short, strict=True)
    ]

    def add_up(*arrays: np.ndarray) -> Arrays:
        joined_arrays = _join(arrays)
        sums = axis.transport.all_reduce(joined_arrays)
        return _split(sums, arrays, joined_arrays)

    sums = _send(axis, "all_reduce", add_up, operands)
    return [x if short else x / over for x, short in zip(sums, is_short, strict=True)]


def gather(tree: PyTree, axis: Peers) -> PyTree:
    """`collectives.gather` over processes."""

    def gather_bytes(*arrays: np.ndarray) -> Arrays:
        return _gather(arrays, axis)

    leaves, form = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    rows = _send(axis, "all_gather", gather_bytes, leaves, new_axes=(axis.size,))
    return form.unflatten(rows)


def shift(tree: PyTree, by: int, axis: Peers) -> PyTree:
    """`collectives.shift` over processes."""
    sources = [(worker + by) % axis.size for worker in range(axis.size)]
    return exchange(tree, [sources], 0, axis)


def exchange(
    tree: PyTree, sources: Sequence[Sequence[int]], chosen: Any, axis: Peers
) -> PyTree:
    """`collectives.exchange` over processes."""
    no_mean("an exchange between single workers")
    table = np.asarray(sources)

    def exchange_bytes(row: np.ndarray, *arrays: np.ndarray) -> Arrays:
        return _exchange(arrays, table[row], axis)

    leaves, form = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    if (table == np.arange(axis.size)).all():
        return form.unflatten(leaves)
    row = jnp.asarray(chosen, jnp.int32)
    method = _moving_method(axis)
    arrived = _send(axis, method, exchange_bytes, leaves, leading_operands=[row])
    return form.unflatten(arrived)


def all_to_all(tree: PyTree, axis: Peers) -> PyTree:
    """`collectives.all_to_all` over processes."""
    rank = axis.rank
    size = axis.size

    def transpose(*arrays: np.ndarray) -> Arrays:
        if not _has_send_receive(axis):
            return [every[:, rank] for every in _gather(arrays, axis)]
        results = [x.copy() for x in arrays]
        for distance in range(1, size):
            target = (rank + distance) % size
            source = (rank - distance) % size
            rows = [x[target : target + 1] for x in arrays]
            arrived = _send_receive(rows, target, source, axis)
            for result, row in zip(results, arrived, strict=True):
                result[source] = row[0]
        return results

    leaves, form = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    return form.unflatten(_send(axis, _moving_method(axis), transpose, leaves))


def mean_of_group(tree: PyTree, groups: int, axis: Peers) -> PyTree:
    """Returns the mean over this process's group, one of several of equal size.

    It sends as much as a ring within the group: a part of each array to each member,
    which adds up, and the sums to all members.
    """
    members = axis.size // groups
    member = axis.rank % members

    def shift_in_group(x: jax.Array, by: int) -> jax.Array:
        first_workers = np.arange(axis.size) // members * members
        sources = first_workers + (np.arange(axis.size) + by) % members
        return exchange(x, [sources.tolist()], 0, axis)

    def mean_of_leaf(x: jax.Array) -> jax.Array:
        length = -(-x.size // members)
        padded = jnp.pad(x.reshape(-1), (0, length * members - x.size))
        parts = padded.reshape(members, length)
        part = widen(parts[member])
        for distance in range(1, members):
            # This process receives from `distance` ahead, and sends as far back.
            receiver = (member - distance) % members
            part = part + widen(shift_in_group(parts[receiver], distance))
        part = narrow(part / members, x)
        means = jnp.zeros_like(parts).at[member].set(part)
        for distance in range(1, members):
            source = (member + distance) % members
            means = means.at[source].set(shift_in_group(part, distance))
        return means.reshape(-1)[: x.size].reshape(x.shape)

    return on_floats(lambda leaves: [mean_of_leaf(x) for x in leaves], tree)


def _send(
    axis: Peers,
    method: str,
    function: HostFunction,
    leaves: Sequence[jax.Array],
    new_axes: tuple[int, ...] = (),
    leading_operands: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Sends the leaves that are not empty.

    Args:
        axis: the processes.
        method: the transport's method, for messages.
        function: NumPy arrays -> what arrived for each of them.
        leaves: arrays of any dtypes, also typed random keys.
        new_axes: the axes that what arrives has before those of the leaves.
        leading_operands: arrays that the function gets before those of the leaves.
    """
    numbers = [_as_numbers(x) for x in leaves]
    operands = [x for x in numbers if x.size]
    results = [jax.ShapeDtypeStruct((*new_axes, *x.shape), x.dtype) for x in operands]
    arrived = iter(())
    if operands:
        operands = [*leading_operands, *operands]
        arrived = iter(call_on_host(axis, method, function, operands, results))
    arrays = [
        next(arrived) if x.size else jnp.zeros((*new_axes, *x.shape), x.dtype)
        for x in numbers
    ]
    return [_like(x, leaf) for x, leaf in zip(arrays, leaves, strict=True)]


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_numbers(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if _is_key(x) else x


def _like(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """Makes typed keys of numbers where the leaf holds keys."""
    if not _is_key(leaf):
        return x
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf))


def _moving_method(axis: Peers) -> str:
    return "send_receive" if _has_send_receive(axis) else "all_gather"


def _has_send_receive(axis: Peers) -> bool:
    return hasattr(axis.transport, "send_receive")


def _exchange(arrays: Sequence[np.ndarray], row: np.ndarray, axis: Peers) -> Arrays:
    """Receives the arrays of process row[rank]."""
    source = int(row[axis.rank])
    if not _has_send_receive(axis):
        return [every[source] for every in _gather(arrays, axis)]
    if source == axis.rank:
        return [*arrays]
    target = int(np.flatnonzero(row == axis.rank)[0])
    return _send_receive(arrays, target, source, axis)


def _send_receive(
    arrays: Sequence[np.ndarray], target: int, source: int, axis: Peers
) -> Arrays:
    parts = _join([_as_bytes(x) for x in arrays])
    transport: Any = axis.transport
    arrived = transport.send_receive(parts, target, source)
    return _from_bytes(arrived, arrays, parts)


def _gather(arrays: Sequence[np.ndarray], axis: Peers) -> Arrays:
    """Returns the arrays of all processes, (size, *shape)."""
    parts = _join([_as_bytes(x) for x in arrays])
    arrived = axis.transport.all_gather(parts)
    return _from_bytes(arrived, arrays, parts, new_axes=(axis.size,))


def _as_bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _from_bytes(
    arrived: Sequence[np.ndarray],
    arrays: Sequence[np.ndarray],
    parts: Arrays,
    new_axes: tuple[int, ...] = (),
) -> Arrays:
    """Splits bytes into arrays of the dtypes of those that were sent."""
    split = _split(arrived, [_as_bytes(x) for x in arrays], parts, new_axes)
    return [
        row.view(x.dtype).reshape((*new_axes, *x.shape))
        for row, x in zip(split, arrays, strict=True)
    ]


def _join(arrays: Sequence[np.ndarray]) -> Arrays:
    """Joins arrays of one dtype to flat ones of at most `_messages.BUCKET` bytes."""
    return [
        np.concatenate([arrays[i].reshape(-1) for i in bucket])
        for bucket in buckets(arrays)
    ]


def _split(
    arrived: Sequence[np.ndarray],
    arrays: Sequence[np.ndarray],
    parts: Arrays,
    new_axes: tuple[int, ...] = (),
) -> Arrays:
    """Splits what arrived for joined arrays into what arrived for each.

    Raises:
        ValueError: what arrived has other shapes or dtypes than what was sent.
    """
    results = [*arrays]
    triples = zip(buckets(arrays), arrived, parts, strict=True)
    for bucket, received, part in triples:
        joined = np.asarray(received)
        if joined.dtype != part.dtype or joined.shape != (*new_axes, part.size):
            raise ValueError(
                f"it returned {joined.dtype}{[*joined.shape]} for {part.dtype}"
                f"{[part.size]}, not {part.dtype}{[*new_axes, part.size]}"
            )
        start = 0
        for i in bucket:
            end = start + arrays[i].size
            # A copy, since numbers in the middle of bytes may not be aligned.
            numbers = joined[..., start:end].copy()
            results[i] = numbers.reshape((*new_axes, *arrays[i].shape))
            start = end
    return results
