"""The mean of coded values in two hops, and packing of small whole numbers.

Every worker averages a part of a leaf, and sends the average to all. An all-reduce
would need the sum of two codes to be a code. Gathering all codes costs N/2 times the
bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos._dtypes import wide_dtype
from syncalgos._keys import own_key
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.reducers import _stacking
from syncalgos.reducers._reducer import Draws, Reducer, leafwise


class Code(NamedTuple):
    """A way to send a vector.

    Attributes:
        encode: (vector, its extra numbers) -> code, a tree of arrays.
        decode: (code, length) -> the vector.
    """

    encode: Callable[[jax.Array, Any], Any]
    decode: Callable[[Any, int], jax.Array]


class Combined(NamedTuple):
    """The result of `all_reduce`.

    Attributes:
        mean: the mean as all workers decode it, in the leaf's shape.
        sent_leaf: this worker's own leaf, as the others decode it.
        lost: the loss of the second hop, of the part that this worker averages.
    """

    mean: jax.Array
    sent_leaf: jax.Array
    lost: jax.Array


def part_size(size: int, axis: Axis = WORKERS) -> int:
    """Entries of a leaf that each worker averages; the last worker has fewer."""
    return -(-size // collectives.size(axis))


def split_into_parts(x: jax.Array, axis: Axis = WORKERS) -> jax.Array:
    """Cuts a leaf into the workers' parts: (workers, part), zeros at the end."""
    workers = collectives.size(axis)
    length = part_size(x.size, axis)
    padded = jnp.pad(x.reshape(-1), (0, workers * length - x.size))
    return padded.reshape(workers, length)


def init_part(tree: PyTree, axis: Axis = WORKERS) -> PyTree:
    """Cuts a tree of zeros down to the parts that a worker averages."""

    def take_part(x: jax.Array, pieces: _stacking.Pieces) -> jax.Array:
        take = pieces.map(lambda x: split_into_parts(x, axis)[0])
        return take(pieces.split(x))

    return jax.tree.map(take_part, tree, _stacking.pieces_like(0, tree))


def join_parts(parts: jax.Array, like: jax.Array) -> jax.Array:
    """Joins the parts of `split_into_parts` in the shape of a leaf."""
    return parts.reshape(-1)[: like.size].reshape(like.shape)


def average_coded(
    x: jax.Array,
    code: Code,
    axis: Axis = WORKERS,
    extras: jax.Array | None = None,
    residual: jax.Array | float = 0.0,
    second_code: Code | None = None,
    takes_largest: jax.Array | bool = False,
) -> Combined:
    """Averages coded leaves: each worker averages a part, codes it, sends it to all.

    Args:
        x: this worker's leaf, of floats.
        code: the code of the first hop.
        axis: the mapped axis or axes over which the workers lie.
        extras: extra numbers for `encode`, such as draws, (workers + 1) · part: first
            those for each worker's part of x, then those for the mean of this worker's
            part.
        residual: added to the mean of this worker's part before it is coded, (part,).
        second_code: the code of the second hop; None means the code of the first.
        takes_largest: entries of this worker's part, (part,) booleans, whose largest
            value is sent in place of the mean.

    Returns:
        The mean, this worker's leaf as sent, and the loss of the second hop. Each
        worker sends the codes of N - 1 parts by all-to-all, and the code of one part to
        N - 1 workers by all-gather.
    """
    # Codes cannot be summed on the way. Gathering all codes sends (N - 1) times the
    # array: from 8 workers on, 8-bit codes then take more than float32 in a ring. Two
    # hops send 2 (N - 1)/N times the array at any N.
    rows = split_into_parts(x.astype(wide_dtype(x.dtype)), axis)  # (workers, part)
    part_length = rows.shape[1]
    mean_code = second_code or code
    row_extras = None
    mean_extras = None
    if extras is not None:
        part_extras = extras.reshape(len(rows) + 1, part_length)
        row_extras = part_extras[:-1]  # (workers, part)
        mean_extras = part_extras[-1]

    def decode_rows(code: Code, messages: Any) -> jax.Array:  # (workers, part)
        decode = jax.vmap(lambda message: code.decode(message, part_length))
        return decode(messages).astype(rows.dtype)

    messages = jax.vmap(code.encode)(rows, row_extras)
    # Row i of what arrives is worker i's code of the part that this worker averages.
    arrived = collectives.all_to_all(messages, axis)

    # One after the other: XLA on CPU takes 10 times as long to sum over a leading axis.
    def add(carry: Any, message: Any) -> tuple[Any, None]:
        total, maximum = carry
        value = code.decode(message, part_length).astype(rows.dtype)
        return (total + value, jnp.maximum(maximum, value)), None

    zero = jnp.zeros(part_length, rows.dtype)
    (total, maximum), _ = jax.lax.scan(add, (zero, zero - jnp.inf), arrived)
    owed = jnp.where(takes_largest, maximum, total / len(rows) + residual)
    message = mean_code.encode(owed, mean_extras)
    means = decode_rows(mean_code, collectives.gather(message, axis))
    lost = owed - mean_code.decode(message, part_length).astype(owed.dtype)
    decoded_rows = decode_rows(code, messages)
    return Combined(join_parts(means, x), join_parts(decoded_rows, x), lost)


def drawn(code: Code, seed: int, axis: Axis, second: Code | None = None) -> Reducer:
    """A reducer by `all_reduce`, with each worker's own draws for `encode`."""
    seed = checks.seed(seed)

    def combine(x: jax.Array, draws: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = average_coded(x, code, axis, draws, second_code=second)
        return result.mean, result.sent_leaf

    # One draw for each entry of all parts, and for each entry of this worker's mean.
    def count_draws(x: jax.ShapeDtypeStruct) -> int:
        return (collectives.size(axis) + 1) * part_size(x.size, axis)

    return leafwise(
        combine, draws=Draws(count_draws, partial(own_key, seed, axis=axis))
    )


def pack(levels: jax.Array, bits: int) -> jax.Array:
    """Packs numbers of 8, 4 or 2 bits along the last axis, several to a byte.

    Args:
        levels: whole numbers, (…, n), below 2^bits.
        bits: the bits of each number, 8, 4 or 2.

    Returns:
        (…, ⌈n bits / 8⌉) uint8; the first of a byte's numbers has its lowest bits.
    """
    per_byte = 8 // bits
    padding = [(0, 0)] * (levels.ndim - 1) + [(0, -levels.shape[-1] % per_byte)]
    padded = jnp.pad(levels.astype(jnp.uint8), padding)
    packed = padded[..., ::per_byte]
    for i in range(1, per_byte):
        packed |= padded[..., i::per_byte] << jnp.uint8(i * bits)
    return packed


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """Unpacks the bytes of `pack`; the last may end in zeros."""
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    shifts = jnp.expand_dims(shifts, range(packed.ndim))
    parts = (packed[..., None] >> shifts) & jnp.uint8(2**bits - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def index_dtype(size: int) -> Any:
    """The shortest dtype for indices into `size` entries."""
    return jnp.uint16 if size <= 2**16 else jnp.int32


def pack_12(indices: jax.Array) -> jax.Array:
    """Packs numbers below 4096, (n,), two into three bytes: (⌈3n / 2⌉,) uint8."""
    shifts = jnp.array([[0, 4, 8]], jnp.int32)
    thirds = (indices.astype(jnp.int32)[:, None] >> shifts) & 15
    return pack(thirds.reshape(-1), 4)


def unpack_12(packed: jax.Array, count: int) -> jax.Array:
    """Unpacks the bytes of `pack_12` into `count` numbers, int32."""
    thirds = unpack(packed, 4)[: 3 * count].reshape(count, 3).astype(jnp.int32)
    return thirds[:, 0] | thirds[:, 1] << 4 | thirds[:, 2] << 8
