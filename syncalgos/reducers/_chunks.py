"""The largest entries of each chunk, in few bits, as SparseLoCo sends them."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos._dtypes import wide_dtype, widen
from syncalgos.collectives import WORKERS, Axis
from syncalgos.reducers import _dense, _hops, _stacking
from syncalgos.reducers._reducer import Reducer, count_share, leafwise
from syncalgos.reducers._stacking import Layered
from syncalgos.strategy import factory

# The number of standard deviations that the bins cover, as in the authors' code.
SIGMAS = 6


@factory
def chunked_top_k(
    density: float = 1 / 64,
    *,
    bits: Literal[8, 4, 2] | None = 2,
    chunk: int = 4096,
    layered: Layered = 0,
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of each worker's largest entries, chunk by chunk; others count as 0.

    A leaf is cut, in order, into the fewest chunks of at most `chunk` entries, all of
    one size; zeros fill the last. With L = 2^bits bins over six standard deviations σ
    of a leaf's chosen values v, a value is sent as the number of its bin. It is read as
    the mean of the values in that bin, from a table:

        b = min(L - 1, max(0, round((v - mean(v)) L / 6σ + L / 2)))

    Args:
        density: the share of a chunk's entries that is sent, rounded up; above 0, at
            most 1.
        bits: 8, 4 or 2 bits per value; None sends values whole.
        chunk: the largest chunk, at least 1 entry.
        layered: which leaves hold several layers, each cut and tabled by itself (see
            `Layered`).
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. No state. Each worker gathers the others' indices, bins and tables:
        (N-1) · 14 bits per sent entry with the defaults. Indices take 12 bits in chunks
        of at most 4,096 entries, 16 or 32 in larger ones. A leaf with at most as many
        values as bins sends the values.

    Raises:
        ValueError: a parameter outside its range.

    Source: Sarfi et al., "SparseLoCo", 2025; bins and table as in the authors' code.
    """
    density = checks.density("chunked_top_k", density)
    chunk = checks.whole("chunked_top_k: chunk", chunk, least=1)
    layered = _stacking.check_layered("chunked_top_k: layered", layered)
    if bits is not None:
        _dense.check_bits("chunked_top_k", bits)

    def combine(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        num_chunks = -(-x.size // chunk)
        length = -(-x.size // num_chunks)
        padded = jnp.pad(x.reshape(-1), (0, num_chunks * length - x.size))
        chunks = padded.reshape(num_chunks, length)
        num_largest = count_share(density, length)
        # Ties go to the first: alike on every backend, as lax.top_k is stable.
        _, chosen = jax.lax.top_k(jnp.abs(chunks), num_largest)  # (chunks, largest)
        values = jnp.take_along_axis(chunks, chosen, axis=1).reshape(-1)
        # A chunk of 4,096 entries needs 12 bits an index; the shortest dtype has 16.
        fits_12_bits = length <= 2**12
        if fits_12_bits:
            packed = _hops.pack_12(chosen.reshape(-1))
        else:
            packed = chosen.reshape(-1).astype(_hops.index_dtype(length))
        message = packed, encode_bins(bits, values)

        def read(message: Any) -> tuple[jax.Array, jax.Array]:
            packed, code = message
            indices = packed
            if fits_12_bits:
                indices = _hops.unpack_12(packed, num_chunks * num_largest)
            indices = indices.astype(jnp.int32).reshape(chosen.shape)
            return indices, decode(bits, code, chosen.shape)

        # Added and not set: two workers may have sent the same entry.
        def spread(indices: jax.Array, values: jax.Array) -> jax.Array:
            zeros = jnp.zeros(chunks.shape, wide_dtype(x.dtype))
            rows = jnp.arange(num_chunks)[:, None]
            total = zeros.at[rows, indices].add(widen(values))
            return total.reshape(-1)[: x.size].reshape(x.shape)

        # (workers, chunks, largest) each
        indices, values = jax.vmap(read)(collectives.gather(message, axis))
        mean = spread(indices, values) / collectives.size(axis)
        return mean, spread(*read(message))

    return leafwise(combine, layered)


def encode_bins(bits: int | None, values: jax.Array) -> tuple[jax.Array, ...]:
    """Codes a vector as packed bins and their table; keeps a short one unchanged."""
    # A table would be longer than the values.
    if bits is None or values.size <= 2**bits:
        return (values,)
    bins = 2**bits
    values = widen(values)
    centred = values - jnp.mean(values)
    # Identical values have no spread: any width puts them into the middle bin.
    width = SIGMAS / bins * jnp.std(values, ddof=1)
    scaled = jnp.round(centred / jnp.where(width > 0, width, 1) + bins / 2)
    bin_numbers = jnp.clip(scaled, 0, bins - 1).astype(jnp.uint8)
    zeros = jnp.zeros(bins, values.dtype)
    counts = zeros.at[bin_numbers].add(1)
    table = zeros.at[bin_numbers].add(values) / jnp.maximum(counts, 1)
    # NaN and infinity have no bin. A table of NaN keeps them visible.
    table = jnp.where(jnp.all(jnp.isfinite(values)), table, jnp.nan)
    return _hops.pack(bin_numbers, bits), table


def decode(
    bits: int | None, code: tuple[jax.Array, ...], shape: tuple[int, ...]
) -> jax.Array:
    """Reads the values from a code of `encode`."""
    if bits is None or len(code) == 1:
        return code[0].reshape(shape)
    packed, table = code
    return table[_hops.unpack(packed, bits)[: math.prod(shape)]].reshape(shape)
