"""Messages between processes: small arrays are joined, and large ones are cut.

XLA joins all-reduces by itself, but not those that gloo makes between processes, and no
other collectives: without joining, each array would cost a round trip. All collectives
but all-reduces also leave one direction of a link idle: gloo posts a send before its
receive, so the peer's permission to send waits behind this process's own data. Messages
that fit into a socket's buffer do not wait: docs/measured.md, "A real slow link".
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncalgos.collectives._axes import Setting, platform, several

BUCKET = 2**23
"""The most bytes that one all-reduce joins; longer arrays go alone, without a copy.

4.5 MB take 388 ms in pieces of 1 MB and 385 ms in one at 100 Mbit/s; 43, 40 at 1000.
"""

MESSAGE = 40_000
"""The most bytes of a message to one peer, where a collective is cut."""

AS_GLOO: Setting[bool] = Setting("as_gloo", False)
"""Whether messages are planned for processes that gloo will join."""


def crosses(names: Sequence[str]) -> bool:
    """Whether gloo carries a collective over these axes between processes.

    Args:
        names: the axes. A collective along an axis of one worker sends nothing.

    It is False for workers that are meshes, which send their arrays one by one: to join
    arrays, a worker would have to move their shards between its devices.
    """
    is_gloo_here = platform() == "cpu" and jax.process_count() > 1
    gloo = bool(several(names)) and (is_gloo_here or AS_GLOO.get())
    mesh = jax.sharding.get_abstract_mesh()
    within = {*mesh.axis_names} - {*mesh.manual_axes}
    return gloo and all(mesh.shape[name] == 1 for name in within)


def summed(leaves: Sequence[jax.Array], names: tuple[str, ...]) -> list[jax.Array]:
    """Returns psum of every leaf, by one all-reduce per leaf or per joined leaves.

    Args:
        leaves: arrays.
        names: the axes over which to sum, each of several workers.

    Returns:
        The sums, with the same shapes and dtypes. Between three or more processes the
        order in which gloo adds depends on the place of a number in the message.
    """
    if not crosses(names):
        return [lax.psum(x, names) for x in leaves]
    # Joined in one program, each number is still summed as in its own leaf.
    sums = [*leaves]
    for bucket in buckets(leaves):
        joined = [leaves[i].reshape(-1) for i in bucket]
        total = lax.psum(_joined(joined), names)
        ends = np.cumsum([x.size for x in joined])[:-1]
        for i, part in zip(bucket, jnp.split(total, ends), strict=True):
            sums[i] = part.reshape(leaves[i].shape)
    return sums


def _joined(flat: Sequence[jax.Array]) -> jax.Array:
    """Concatenates flat arrays of one dtype; a single array is not copied."""
    if not flat[1:]:
        return flat[0]
    # XLA on CPU fuses operands, such as the sum of a bias, into a concatenation and
    # computes them for each of its entries: 1.1 MB of an MLP's gradients took 80 ms.
    *starts, length = np.cumsum([0, *(x.size for x in flat)])
    buffer = jnp.zeros(length, flat[0].dtype)
    for x, start in zip(flat, starts, strict=True):
        buffer = lax.dynamic_update_slice(buffer, x, (start,))
    return buffer


def buckets(leaves: Sequence[jax.Array | np.ndarray]) -> list[list[int]]:
    """Groups leaf numbers in order: leaves of one dtype, at most BUCKET bytes."""
    buckets: list[list[int]] = []
    room: dict[np.dtype, int] = {}  # in the last bucket of a dtype
    open_buckets: dict[np.dtype, list[int]] = {}
    for i, x in enumerate(leaves):
        if x.nbytes > room.get(x.dtype, -1):
            open_buckets[x.dtype], room[x.dtype] = [], BUCKET
            buckets.append(open_buckets[x.dtype])
        open_buckets[x.dtype].append(i)
        room[x.dtype] -= x.nbytes
    return buckets


def moved(
    leaves: Sequence[jax.Array],
    send: Callable[[jax.Array], jax.Array],
    names: Sequence[str],
    rows: int = 0,
) -> list[jax.Array]:
    """Moves leaves by a collective that changes no byte, joining and cutting them.

    Args:
        leaves: arrays.
        send: a collective of one array; it may add leading axes to it.
        names: the axes over which it sends.
        rows: 0, or the number of lanes, if each sends arrays with a row for each peer.

    Returns:
        The leaves that arrived.
    """
    lead = min(rows, 1)
    joins = crosses(names)
    mine = [i for i, x in enumerate(leaves) if joins and _has_bytes(x)]
    moved_leaves = [x if i in mine else send(x) for i, x in enumerate(leaves)]
    if not mine:
        return moved_leaves
    joined_leaves = [leaves[i] for i in mine]
    flat = [x.reshape(*x.shape[:lead], -1).view(jnp.uint8) for x in joined_leaves]
    arrived = _cut(jnp.concatenate(flat, axis=-1), send, MESSAGE // max(rows, 1))
    ends = np.cumsum([x.shape[-1] for x in flat])[:-1]
    parts = jnp.split(arrived, ends, axis=-1)
    for i, x, part in zip(mine, joined_leaves, parts, strict=True):
        moved_leaves[i] = part.view(x.dtype).reshape(*part.shape[:-1], *x.shape[lead:])
    return moved_leaves


def _has_bytes(x: jax.Array) -> bool:
    """Whether XLA can cast an array to bytes; not complex numbers, keys and int4."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.finfo(x.dtype).bits >= 8
    return isinstance(x.dtype, np.dtype) and x.dtype.kind in "iub"


def _cut(
    x: jax.Array, send: Callable[[jax.Array], jax.Array], longest: int
) -> jax.Array:
    """Sends an array of bytes, (…, n), in equal messages and one for the rest.

    Args:
        x: the bytes.
        send: a collective of an array of the same leading axes.
        longest: the most bytes of a message along the last axis.
    """
    length = x.shape[-1]
    count = max(1, -(-length // longest))
    size = length // count
    # No message is padded, so that the ledger's count stays exact.
    equal_part = x[..., : count * size]
    remainder = x[..., count * size :]
    pieces = jnp.moveaxis(equal_part.reshape(*x.shape[:-1], count, size), -2, 0)
    arrived = lax.map(send, pieces) if count > 1 else send(pieces[0])[None]
    arrived = jnp.moveaxis(arrived, 0, -2)
    arrived = arrived.reshape(*arrived.shape[:-2], count * size)
    if not remainder.size:
        return arrived
    return jnp.concatenate([arrived, send(remainder)], axis=-1)
