"""Small whole numbers in few bytes: what is sent is counted, and sent, as such."""

from typing import Any

import jax
import jax.numpy as jnp


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
