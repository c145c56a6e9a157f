"""Reducers that send every entry: exactly, or in fewer bits."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks, collectives
from syncalgos._dtypes import if_finite, narrow, on_floats, widen, zeros
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.reducers import _hops, _stacking
from syncalgos.reducers._reducer import (
    Reducer,
    check_step,
    is_sent,
    leafwise,
    over_leaves,
)
from syncalgos.strategy import factory

# Entries that share one scale: the bucket of QSGD's experiments.
BLOCK = 512


@factory
def mean(accumulate: Any = None, *, axis: Axis = WORKERS) -> Reducer:
    """The exact mean over the workers; leaves that are not floats are kept.

    Args:
        accumulate: the dtype in which values are sent and summed; None means the
            values' own dtype.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. No state. An all-reduce sends every entry: 2 (N-1)/N times the bytes
        of the tree.

    Raises:
        ValueError: a dtype that is not a float.
    """
    if accumulate is not None:
        accumulate = check_float("mean: accumulate", accumulate)

    def combine(
        updates: PyTree, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree, PyTree]:
        arrays = jax.tree.map(jnp.asarray, updates)
        if accumulate is None:
            return collectives.mean(arrays, axis), updates, state
        # All leaves in one call: how lanes are best summed depends on all of them.
        wide_arrays = on_floats(lambda xs: [x.astype(accumulate) for x in xs], arrays)
        mean = collectives.mean(wide_arrays, axis)
        return narrow(mean, arrays), updates, state

    return Reducer(combine, mean_over=axis if accumulate is None else None)


@factory
def cast(dtype: Any, *, axis: Axis = WORKERS) -> Reducer:
    """The mean of values rounded to a shorter float, summed in float32.

    Args:
        dtype: a float of 8 or 16 bits; values beyond its range overflow.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. No state. Each worker sends every entry twice, by all-to-all and by
        all-gather: 2 (N-1)/N times the bytes of the shorter tree.

    Raises:
        ValueError: any other dtype.
    """
    dtype = check_float("cast: dtype", dtype)
    if dtype.itemsize > 2:
        raise ValueError(f"cast: dtype must have 8 or 16 bits, got {dtype}")
    bits = jnp.uint16 if dtype.itemsize == 2 else jnp.uint8

    # Sent as integers: XLA on CPU widens short floats in collectives.
    def to_bits(x: jax.Array, draws: Any) -> jax.Array:
        return jax.lax.bitcast_convert_type(x.astype(dtype), bits)

    def from_bits(code: jax.Array, length: int) -> jax.Array:
        return jax.lax.bitcast_convert_type(code, dtype)

    def combine(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = _hops.average_coded(x, _hops.Code(to_bits, from_bits), axis)
        return result.mean, result.sent_leaf

    return leafwise(combine)


@factory
def bf16(*, axis: Axis = WORKERS) -> Reducer:
    """The mean of values rounded to bfloat16, summed in float32: half the bytes."""
    # It has the exponents of float32, so it overflows only where float32 does.
    return cast(jnp.bfloat16, axis=axis)


@factory
def fp16(*, axis: Axis = WORKERS) -> Reducer:
    """The mean of values rounded to float16, summed in float32: half the bytes.

    Beyond ±65504 it overflows to infinity, and below 6e-8 to zero.
    """
    return cast(jnp.float16, axis=axis)


@factory
def quantized(
    bits: Literal[8, 4, 2] = 8, *, seed: int = 0, axis: Axis = WORKERS
) -> Reducer:
    """The mean of values rounded at random to few bits, summed in float32.

    For L = 2^(bits-1) - 1 (127, 7, 1) and s the largest magnitude in a block of at most
    512 entries, an entry x is sent as floor(L x / s + u), with u uniform on [0, 1), and
    read as s / L times that number. This is unbiased. Each worker averages its part of
    a leaf, and sends the average on, rounded once more.

    Args:
        bits: 8, 4 or 2 bits per entry; several share a byte.
        seed: seeds u, which differs between workers.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. No state. Each worker sends every entry twice, in `bits` bits, by
        all-to-all and by all-gather, and a scale per block.

    Raises:
        ValueError: bits other than 8, 4 or 2.

    Source: Alistarh et al., "QSGD", NeurIPS 2017, section 3.1, with the largest
    magnitude for the norm, as in its experiments; 2 bits: Wen et al., "TernGrad",
    NeurIPS 2017.
    """
    check_bits("quantized", bits)
    code = _hops.Code(partial(encode_levels, bits), partial(decode, bits))
    return _hops.drawn(code, seed, axis)


def check_float(label: str, dtype: Any) -> np.dtype:
    """Returns a dtype of floats, or raises a ValueError."""
    try:
        checked_dtype = jnp.dtype(dtype)
    except TypeError:
        checked_dtype = None
    if checked_dtype is None or not jnp.issubdtype(checked_dtype, jnp.floating):
        raise ValueError(f"{label} must be a dtype of floats, got {dtype!r}")
    return checked_dtype


def check_bits(where: str, bits: Any) -> None:
    """Raises a ValueError unless bits is 8, 4 or 2."""
    checks.untraced(f"{where}: bits", bits)
    if not isinstance(bits, int) or bits not in (8, 4, 2):
        raise ValueError(f"{where}: bits must be 8, 4 or 2, got {checks.shown(bits)}")


def encode_levels(
    bits: int, x: jax.Array, draws: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rounds a vector by uniform draws; returns its levels, packed, and its scales."""
    levels = 2 ** (bits - 1) - 1
    per_byte = 8 // bits
    count = -(-x.size // BLOCK)
    length = -(-x.size // (count * per_byte)) * per_byte

    def cut_into_blocks(v: jax.Array) -> jax.Array:
        return jnp.pad(v, (0, count * length - v.size)).reshape(count, length)

    blocks = cut_into_blocks(x)  # (blocks, length)
    scale = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
    # No level is infinite: a scale of NaN keeps infinity visible.
    scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)
    # XLA divides by a reciprocal, which would be 0 near the largest float32.
    unit = jnp.where(scale > 2.0**100, 2.0**-50, 1.0)
    ratio = (blocks * unit) / jnp.where(scale > 0, scale * unit, 1)
    level = jnp.floor(levels * ratio + cut_into_blocks(draws))
    level = jnp.clip(level, -levels, levels) + levels
    return _hops.pack(level, bits), scale


def decode(bits: int, code: tuple[jax.Array, jax.Array], length: int) -> jax.Array:
    """Reads the vector of a length from a code of `encode`."""
    packed, scale = code
    levels = 2 ** (bits - 1) - 1
    blocks = _hops.unpack(packed, bits).astype(scale.dtype) - levels
    return (blocks / levels * scale).reshape(-1)[:length]


class LowBitState(NamedTuple):
    """Moving averages of losses: e of all leaves, ē of this worker's part."""

    residual: PyTree
    of_part: PyTree


@factory
def low_bit(
    bits: Literal[8, 4, 2] = 4,
    *,
    beta: float = 0.8,
    reset_period: int = 1024,
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of values rounded to few bits, with averaged errors fed back.

    On each of two hops, to the worker that averages a part and from there to all, with
    Q rounding to the nearest of 2^bits - 1 levels at a scale per 512 entries or fewer:

        x ← x + e;   q ← Q(x);   e ← β e + (1 - β) (x - q)

    All e are reset to 0 after local steps reset_period, 2 · reset_period, …, if the
    reducer is called at that step.

    Args:
        bits: 8, 4 or 2 bits per entry; several share a byte.
        beta: β, the decay of e, at least 0 and below 1.
        reset_period: local steps between two resets, at least 1.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. State: e of the leaves, shaped like params, and of the part that the
        worker averages, each worker's own, at least float32. It sends as much as
        `quantized`.

    Raises:
        ValueError: a parameter outside its range.

    Until a reset, the sum of all sent values is the sum of all inputs minus
    e / (1 - β).

    Source: Xie, Lin, Toh and Zhou, "LoCo: low-bit communication adaptor for large-scale
    model training", TPAMI 2025.
    """
    check_bits("low_bit", bits)
    beta = checks.real("low_bit: beta", beta, least=0, below=1)
    period = checks.whole("low_bit: reset_period", reset_period, least=1)

    # Draws of 1/2 round to the nearest level.
    def to_nearest(x: jax.Array, draws: Any) -> tuple[jax.Array, jax.Array]:
        return encode_levels(bits, x, jnp.full(x.shape, 0.5, x.dtype))

    code = _hops.Code(to_nearest, partial(decode, bits))

    def init(params: PyTree) -> LowBitState:
        residual = zeros(params)
        return LowBitState(residual, _hops.init_part(residual, axis))

    def combine(
        updates: PyTree, state: LowBitState, step: Any
    ) -> tuple[PyTree, PyTree, LowBitState]:
        check_step(step)
        keeps = (step + 1) % period != 0
        participates = collectives.takes_part()

        def update_residual(e: jax.Array, lost: jax.Array) -> jax.Array:
            return jnp.where(keeps, beta * e + (1 - beta) * lost, 0)

        def reduce_piece(owed: jax.Array, part_residual: jax.Array) -> _hops.Combined:
            return _hops.average_coded(owed, code, axis, residual=part_residual)

        def combine_leaf(
            x: jax.Array,
            e: jax.Array,
            part_residual: jax.Array,
            pieces: _stacking.Pieces,
        ) -> tuple[jax.Array, ...]:
            if not is_sent(x):
                return x, x, e, part_residual
            owed = jnp.where(participates, widen(x) + e, 0)
            result = pieces.map(reduce_piece)(pieces.split(owed), part_residual)
            mean = pieces.join(result.mean).astype(x.dtype)
            sent_leaf = pieces.join(result.sent_leaf)
            residual = jnp.where(
                participates,
                update_residual(e, owed - sent_leaf),
                jnp.where(keeps, e, 0),
            )
            part_residual = update_residual(part_residual, result.lost)
            return mean, sent_leaf.astype(x.dtype), residual, part_residual

        pieces = _stacking.pieces_like(0, updates)
        combined, sent_updates, *new_state = over_leaves(
            combine_leaf, 4, updates, *state, pieces
        )
        new_state = if_finite(combined, LowBitState(*new_state), state)
        return combined, sent_updates, new_state

    return Reducer(combine, init, takes_feedback=False)
