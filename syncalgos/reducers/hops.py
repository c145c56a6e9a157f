"""The mean of coded values in two hops: to the worker that averages a part, and on.

An all-reduce would need the sum of two codes to be a code; and gathering all codes
costs N/2 times the bytes of this.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis
from syncalgos.dtypes import wide_dtype
from syncalgos.keys import own_key
from syncalgos.reducers.reducer import Reducer, drawing


class Code(NamedTuple):
    """How a vector is sent.

    Attributes:
        encode: (vector, its numbers beside) -> what is sent, a tree of arrays.
        decode: (what was sent, length) -> the vector.
    """

    encode: Callable[[jax.Array, Any], Any]
    decode: Callable[[Any, int], jax.Array]


class Combined(NamedTuple):
    """What `all_reduce` returns.

    Attributes:
        mean: of all workers, as all decode it; in the leaf's shape.
        sent: this worker's own leaf, as the others decode it.
        lost: by the second hop, of the part that this worker averages.
    """

    mean: jax.Array
    sent: jax.Array
    lost: jax.Array


def part_size(size: int, axis: Axis = WORKERS) -> int:
    """Entries of a leaf that each worker averages, the last one fewer."""
    return -(-size // collectives.size(axis))


def beside_size(size: int, axis: Axis = WORKERS) -> int:
    """Numbers that `all_reduce` can take beside a leaf of so many entries."""
    return (collectives.size(axis) + 1) * part_size(size, axis)


def in_parts(x: jax.Array, axis: Axis = WORKERS) -> jax.Array:
    """The leaf by the workers that average its parts: (workers, part), 0 at the end."""
    n, part = collectives.size(axis), part_size(x.size, axis)
    return jnp.pad(x.reshape(-1), (0, n * part - x.size)).reshape(n, part)


def whole(parts: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `in_parts`, in the shape of a leaf."""
    return parts.reshape(-1)[: like.size].reshape(like.shape)


def all_reduce(
    x: jax.Array,
    code: Code,
    axis: Axis = WORKERS,
    beside: jax.Array | None = None,
    residual: jax.Array | float = 0.0,
    second: Code | None = None,
) -> Combined:
    """The mean of coded leaves: every worker averages a part, and sends that coded.

    Args:
        x: this worker's leaf, of floats.
        code: of the first hop.
        axis: the mapped axis or axes over which the workers lie.
        beside: `beside_size` numbers that `encode` takes with x, such as draws: with
            each worker's part, and at last with the mean of the own part.
        residual: added to the mean of the own part before it is coded.
        second: the code of the second hop; none is the first one's.
    """
    rows = in_parts(x.astype(wide_dtype(x.dtype)), axis)
    second, part = second or code, rows.shape[1]
    of_parts, of_mine = None, None
    if beside is not None:
        beside = beside.reshape(len(rows) + 1, part)
        of_parts, of_mine = beside[:-1], beside[-1]

    def decoded(code, sent):  # (workers, part)
        return jax.vmap(lambda s: code.decode(s, part))(sent).astype(rows.dtype)

    sent = jax.vmap(code.encode)(rows, of_parts)
    # Row i of what arrives is worker i's code of the part that this worker averages.
    arrived = decoded(code, collectives.all_to_all(sent, axis))
    owed = jnp.mean(arrived, axis=0) + residual
    sent_on = second.encode(owed, of_mine)
    means = decoded(second, collectives.gather(sent_on, axis))
    return Combined(
        mean=whole(means, x),
        sent=whole(decoded(code, sent), x),
        lost=owed - second.decode(sent_on, part).astype(owed.dtype),
    )


def drawn(code: Code, seed: int, axis: Axis, second: Code | None = None) -> Reducer:
    """A reducer by `all_reduce`, beside whose values go each worker's own draws."""
    seed = checks.whole("seed", seed, least=0)

    def combine(x, draws):
        return all_reduce(x, code, axis, draws, second=second)[:2]

    return drawing(
        combine,
        lambda x: beside_size(x.size, axis),
        partial(own_key, seed, axis=axis),
    )


def pack(levels: jax.Array, bits: int) -> jax.Array:
    """Numbers of 8, 4 or 2 bits, several to a byte along the last axis: uint8."""
    per_byte = 8 // bits
    padding = [(0, 0)] * (levels.ndim - 1) + [(0, -levels.shape[-1] % per_byte)]
    whole = jnp.pad(levels.astype(jnp.uint8), padding)
    parts = whole.reshape(*levels.shape[:-1], -1, per_byte)
    return jnp.sum(parts << _shifts(bits), axis=-1, dtype=jnp.uint8)


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """The numbers that `pack` made bytes of, and zeros up to the last byte's end."""
    parts = (packed[..., None] >> _shifts(bits)) & jnp.uint8(2**bits - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def _shifts(bits: int) -> jax.Array:
    return jnp.arange(0, 8, bits, dtype=jnp.uint8)


def index_dtype(size: int) -> Any:
    """The shortest integers in which indices into so many entries are sent."""
    return jnp.uint16 if size <= 2**16 else jnp.int32


def pack_12(indices: jax.Array) -> jax.Array:
    """Numbers below 4096, (n,), two to three bytes: (⌈3n / 2⌉,) uint8."""
    count = len(indices)
    pairs = jnp.pad(indices.astype(jnp.int32), (0, count % 2)).reshape(-1, 2)
    first, second = pairs[:, 0], pairs[:, 1]
    parts = [first & 255, (first >> 8) | ((second & 15) << 4), second >> 4]
    return jnp.stack(parts, 1).astype(jnp.uint8).reshape(-1)[: -(-3 * count // 2)]


def unpack_12(packed: jax.Array, count: int) -> jax.Array:
    """The so many numbers that `pack_12` made bytes of, int32."""
    threes = jnp.pad(packed, (0, -len(packed) % 3)).reshape(-1, 3).astype(jnp.int32)
    low, middle, high = threes[:, 0], threes[:, 1], threes[:, 2]
    pairs = jnp.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], 1)
    return pairs.reshape(-1)[:count]
