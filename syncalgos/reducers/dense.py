"""Reducers that send every entry: exactly, or in fewer bits."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks, collectives, stacking
from syncalgos.collectives import WORKERS, Axis
from syncalgos.draws import own_key
from syncalgos.precision import wide_dtype
from syncalgos.reducers import packing
from syncalgos.reducers.reducer import Reducer, drawing, leafwise
from syncalgos.stacking import Stacked

BLOCK = 512  # entries that share one scale; the bucket of QSGD's experiments


def mean(accumulate: Any = None, axis: Axis = WORKERS) -> Reducer:
    """The exact mean over the workers; leaves that are no floats are kept.

    Args:
        accumulate: dtype in which values are sent and summed; none means their own.
        axis: the mapped axis or axes over which the workers lie.
    """
    if accumulate is not None:
        accumulate = check_float("mean: accumulate", accumulate)

    def combine(updates, state, step):
        def wide(x):
            is_float = jnp.issubdtype(x.dtype, jnp.inexact)
            return x.astype(accumulate) if accumulate and is_float else x

        own = jax.tree.map(jnp.asarray, updates)
        # All at once: it depends on all leaves how lanes are best summed.
        means = collectives.mean(jax.tree.map(wide, own), axis)
        if accumulate:
            means = jax.tree.map(
                lambda x, mean: mean if mean.dtype == x.dtype else mean.astype(x.dtype),
                own,
                means,
            )
        return means, updates, state

    reducer = Reducer(combine)
    reducer.mean_over = axis if accumulate is None else None
    return reducer


def cast(dtype: Any, axis: Axis = WORKERS) -> Reducer:
    """The mean of values rounded to a shorter float, summed in float32.

    Each worker sends every entry twice, by all_to_all and by all_gather: 2 (N-1)/N
    times as many bytes as the shorter array has, in `Communication`'s count.
    """
    dtype = check_float("cast: dtype", dtype)
    if dtype.itemsize > 2:
        raise ValueError(f"cast: dtype must have 8 or 16 bits, got {dtype}")
    bits = jnp.uint16 if dtype.itemsize == 2 else jnp.uint8

    def to_bits(x, draws):  # integers: XLA on CPU would widen short floats on the way
        return jax.lax.bitcast_convert_type(x.astype(dtype), bits)

    def from_bits(code, length):
        return jax.lax.bitcast_convert_type(code, dtype)

    def combine(x):
        return _all_reduce(x, to_bits, from_bits, axis)

    return leafwise(combine)


def bf16(axis: Axis = WORKERS) -> Reducer:
    """The mean of values rounded to bfloat16, summed in float32: half the bytes."""
    return cast(jnp.bfloat16, axis)


def fp16(axis: Axis = WORKERS) -> Reducer:
    """The mean of values rounded to float16, summed in float32: half the bytes.

    Beyond ±65504 it overflows to infinity, and below 6e-8 to zero.
    """
    return cast(jnp.float16, axis)


def quantized(
    bits: Literal[8, 4, 2] = 8, seed: int = 0, axis: Axis = WORKERS
) -> Reducer:
    """The mean of values rounded at random to few bits, summed in float32.

    For L = 2^(bits-1) - 1 (127, 7, 1) and s the largest magnitude of its block of at
    most 512 entries, an entry x is sent as floor(L x / s + u), u uniform on [0, 1),
    and read as s / L times that: unbiased. Each worker averages its part of the
    array, and sends the average on, rounded once more.

    Args:
        bits: 8, 4 or 2 bits per entry; several share a byte.
        seed: of the draws, which differ between workers.
        axis: the mapped axis or axes over which the workers lie.

    Source: Alistarh et al., "QSGD", NeurIPS 2017, section 3.1, with the largest
    magnitude for the norm, as in its experiments; 2 bits: Wen et al., "TernGrad",
    NeurIPS 2017.
    """
    check_bits("quantized", bits)
    seed = checks.whole("seed", seed, least=0)

    def combine(x, draws):
        code = partial(encode, bits), partial(decode, bits)
        return _all_reduce(x, *code, axis, draws)

    key = partial(own_key, seed, axis=axis)
    return drawing(combine, partial(_draws, axis), key)


def check_float(label: str, dtype: Any) -> np.dtype:
    """Returns a dtype of floats, or raises a ValueError."""
    try:
        made = jnp.dtype(dtype)
    except TypeError:
        made = None
    if made is None or not jnp.issubdtype(made, jnp.floating):
        raise ValueError(f"{label} must be a dtype of floats, got {dtype!r}")
    return made


def check_bits(where: str, bits: Any) -> None:
    """Raises a ValueError unless bits is 8, 4 or 2."""
    if not isinstance(bits, int) or bits not in (8, 4, 2):
        raise ValueError(f"{where}: bits must be 8, 4 or 2, got {checks.shown(bits)}")


def encode(bits: int, x: jax.Array, draws: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds a vector by uniform draws: its levels, packed into bytes, and scales."""
    levels, per_byte = 2 ** (bits - 1) - 1, 8 // bits
    count = -(-x.size // BLOCK)
    length = -(-x.size // (count * per_byte)) * per_byte

    def in_blocks(v):
        return jnp.pad(v, (0, count * length - v.size)).reshape(count, length)

    blocks = in_blocks(x)
    scale = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
    scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)  # no level is infinite
    # XLA divides by a reciprocal, which would be 0 near the largest float32.
    unit = jnp.where(scale > 2.0**100, 2.0**-50, 1.0)
    ratio = (blocks * unit) / jnp.where(scale > 0, scale * unit, 1)
    level = jnp.floor(levels * ratio + in_blocks(draws))
    level = jnp.clip(level, -levels, levels) + levels
    return packing.pack(level, bits), scale


def decode(bits: int, code: tuple[jax.Array, jax.Array], length: int) -> jax.Array:
    """The vector of so many entries that `encode` made a code of."""
    packed, scale = code
    levels = 2 ** (bits - 1) - 1
    blocks = packing.unpack(packed, bits).astype(scale.dtype) - levels
    return (blocks / levels * scale).reshape(-1)[:length]


def sign(
    majority: bool = False,
    seed: int = 0,
    stacked: Stacked = 0,
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of scaled signs, or the sign of most workers: one bit per entry.

    Scaled: mean(|x|) · sign(x) of each worker and leaf, gathered from all: (N-1) / 8
    bytes per entry. Majority: the sign of the sum of signs, whatever the magnitudes:
    (N-1) / 4N bytes per entry. A vote draws the sign of 0, and that of a tie: taken as
    + they would move all entries by an even number of workers. Scaled, the sign of 0 is
    +, as error feedback takes it back.

    Args:
        majority: vote, instead of averaging the scaled signs.
        seed: of the votes' draws, which differ between workers.
        stacked: which leaves hold several layers, each with a scale of its own (see
            `Stacked`).
        axis: the mapped axis or axes over which the workers lie.

    Source: scaled: Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019,
    algorithm 1; majority: Bernstein et al., "signSGD", ICML 2018, algorithm 3.
    """
    seed = checks.whole("seed", seed, least=0)
    stacked = stacking.check("sign: stacked", stacked)

    def to_bits(x, draws):
        return jnp.packbits(jnp.where(x == 0, draws < 0.5, x > 0))

    def to_signs(code, length):
        return 2.0 * jnp.unpackbits(code, count=length) - 1

    def vote(x, draws):
        return _all_reduce(x, to_bits, to_signs, axis, draws)

    def scaled(x):
        flat = x.astype(wide_dtype(x.dtype)).reshape(-1)
        scale = jnp.mean(jnp.abs(flat))
        codes, scales = collectives.gather((to_bits(flat, 0), scale), axis)
        signs = jax.vmap(lambda code: to_signs(code, x.size))(codes)  # (workers, size)
        combined = jnp.mean(scales[:, None] * signs, axis=0)
        sent = scale * jnp.where(flat >= 0, 1.0, -1.0)
        return combined.reshape(x.shape), sent.reshape(x.shape)

    if not majority:
        return leafwise(scaled, stacked)
    return drawing(vote, partial(_draws, axis), partial(own_key, seed, axis=axis))


def _draws(axis: Axis, x: jax.Array) -> int:
    """The draws of `_all_reduce`: for each worker's part, and the own part's mean."""
    n = collectives.size(axis)
    return (n + 1) * -(-x.size // n)


def _all_reduce(
    x: jax.Array,
    encode: Callable[[jax.Array, Any], Any],
    decode: Callable[[Any, int], jax.Array],
    axis: Axis,
    draws: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The mean of coded values: every worker averages a part, and sends that coded.

    An all-reduce would need the sum of two codes to be a code; and gathering all codes
    costs N/2 times the bytes of this.
    """
    n, wide = collectives.size(axis), wide_dtype(x.dtype)
    part = -(-x.size // n)
    flat = jnp.pad(x.reshape(-1).astype(wide), (0, n * part - x.size))
    of_parts, of_mine = None, None
    if draws is not None:
        draws = draws.reshape(n + 1, part)
        of_parts, of_mine = draws[:n], draws[n]
    codes = jax.vmap(encode)(flat.reshape(n, part), of_parts)

    def decoded(codes):  # (workers, part)
        return jax.vmap(lambda code: decode(code, part))(codes).astype(wide)

    def whole(parts):
        return parts.reshape(-1)[: x.size].reshape(x.shape)

    # Row i of what arrives is worker i's code of the part that this worker averages.
    average = jnp.mean(decoded(collectives.all_to_all(codes, axis)), axis=0)
    averages = collectives.gather(encode(average, of_mine), axis)
    return whole(decoded(averages)), whole(decoded(codes))
