"""Reducers that send every entry: exactly, or in fewer bits."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.dtypes import if_finite, widen
from syncalgos.reducers import hops
from syncalgos.reducers.reducer import (
    Reducer,
    check_step,
    is_sent,
    leafwise,
    over_leaves,
)

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
        return hops.all_reduce(x, hops.Code(to_bits, from_bits), axis)[:2]

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
    code = hops.Code(partial(encode, bits), partial(decode, bits))
    return hops.drawn(code, seed, axis)


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
    return hops.pack(level, bits), scale


def decode(bits: int, code: tuple[jax.Array, jax.Array], length: int) -> jax.Array:
    """The vector of so many entries that `encode` made a code of."""
    packed, scale = code
    levels = 2 ** (bits - 1) - 1
    blocks = hops.unpack(packed, bits).astype(scale.dtype) - levels
    return (blocks / levels * scale).reshape(-1)[:length]


class LowBitState(NamedTuple):
    """The moving averages of what was lost: e of own leaves, and ē of the own part."""

    residual: PyTree
    of_part: PyTree


def low_bit(
    bits: Literal[8, 4, 2] = 4,
    beta: float = 0.8,
    reset_period: int = 1024,
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of values rounded to few bits, with averaged errors fed back.

    On each of two hops, to the worker that averages a part and on to all, Q rounding to
    the nearest of 2^bits - 1 levels at a scale for each 512 entries or less:

        x ← x + e;   q ← Q(x);   e ← β e + (1 - β) (x - q)

    All e are 0 after local steps reset_period, 2 · reset_period, …, if it acts then.

    Args:
        bits: 8, 4 or 2 bits per entry; several share a byte.
        beta: β, the share of the old e that is kept, at least 0 and below 1.
        reset_period: local steps between two resets, at least 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A reducer. State: e, shaped like params, and that of the part which the worker
        averages, its own, at least float32. It sends what `quantized` does.

    Up to a reset all that was sent is all there was, less e / (1 - β).

    Source: Xie, Lin, Toh and Zhou, "LoCo: low-bit communication adaptor for large-scale
    model training", TPAMI 2025.
    """
    check_bits("low_bit", bits)
    beta = checks.real("low_bit: beta", beta, least=0, below=1)
    period = checks.whole("low_bit: reset_period", reset_period, least=1)
    code = hops.Code(
        lambda x, _: encode(bits, x, jnp.full(x.shape, 0.5, x.dtype)),
        partial(decode, bits),
    )

    def init(params):
        residual = jax.tree.map(jnp.zeros_like, widen(params))
        part = jax.tree.map(lambda x: hops.in_parts(x, axis)[0], residual)
        return LowBitState(residual, part)

    def combine(updates, state, step: Any):
        check_step(step)
        kept = (step + 1) % period != 0

        def left(e, lost):
            return jnp.where(kept, beta * e + (1 - beta) * lost, 0)

        def leaf(x, e, part):
            if not is_sent(x):
                return x, x, e, part
            owed = widen(x) + e
            found = hops.all_reduce(owed, code, axis, residual=part)
            own = left(e, owed - found.sent), left(part, found.lost)
            return found.mean.astype(x.dtype), found.sent.astype(x.dtype), *own

        combined, sent, *new = over_leaves(leaf, 4, updates, *state)
        return combined, sent, if_finite(combined, LowBitState(*new), state)

    reducer = Reducer(combine, init)
    reducer.takes_feedback = False
    return reducer
