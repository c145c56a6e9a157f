"""Reducers that send one bit per entry: its sign."""

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis
from syncalgos.dtypes import wide_dtype
from syncalgos.reducers import hops, stacking
from syncalgos.reducers.reducer import Reducer, leafwise
from syncalgos.reducers.stacking import Stacked


def sign(
    majority: bool = False,
    seed: int = 0,
    stacked: Stacked = 0,
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of scaled signs, or the sign of most workers: one bit per entry.

    Scaled: mean(|x|) · sign(x) of each worker and leaf, gathered from all: (N-1) / 8
    bytes per entry. Majority: the sign of the sum of signs, whatever the magnitudes:
    (N-1) / 4N bytes per entry. A vote draws the sign of 0, of NaN and of a tie: if
    those were +, an even number of workers would move all entries. Scaled, the sign of
    0 is +, as error feedback takes it back.

    Args:
        majority: vote, instead of averaging the scaled signs.
        seed: of the votes' draws, which differ between workers.
        stacked: which leaves hold several layers, each with a scale of its own (see
            `Stacked`).
        axis: the mapped axis or axes over which the workers lie.

    Source: scaled: Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019,
    algorithm 1; majority: Bernstein et al., "signSGD", ICML 2018, algorithm 3.
    """
    stacked = stacking.check("sign: stacked", stacked)
    if majority:
        return hops.drawn(BITS, seed, axis)
    checks.whole("seed", seed, least=0)

    def scaled(x):
        flat = x.astype(wide_dtype(x.dtype)).reshape(-1)
        scale = jnp.mean(jnp.abs(flat))
        bits = jnp.packbits(flat >= 0)
        codes, scales = collectives.gather((bits, scale), axis)
        signs = jax.vmap(lambda code: to_signs(code, x.size))(codes)  # (workers, size)
        combined = jnp.mean(scales[:, None] * signs, axis=0)
        sent = scale * jnp.where(flat >= 0, 1.0, -1.0)
        return combined.reshape(x.shape), sent.reshape(x.shape)

    return leafwise(scaled, stacked)


def tally(seed: int = 0, axis: Axis = WORKERS) -> Reducer:
    """The mean of the workers' signs: the votes of `sign(majority=True)`, counted.

    Each worker sends a bit per entry, and on the votes for its part as a whole number:
    9 (N-1) / 8N bytes per entry below 256 workers. The sign of 0 is drawn.

    Args:
        seed: of these draws, which differ between workers.
        axis: the mapped axis or axes over which the workers lie.

    Source: Liu et al., "Distributed Lion", NeurIPS 2024, its averaged signs.
    """

    def to_count(mean, draws):
        n = collectives.size(axis)
        return jnp.round((mean + 1) / 2 * n).astype(np.min_scalar_type(n))

    def to_mean(count, length):
        n = collectives.size(axis)
        return (2.0 * count - n) / n

    return hops.drawn(BITS, seed, axis, second=hops.Code(to_count, to_mean))


def to_bits(x: jax.Array, draws: jax.Array) -> jax.Array:
    """The signs of a vector, packed into bytes; those of 0 and of NaN are drawn."""
    return jnp.packbits(jnp.where((x > 0) | (x < 0), x > 0, draws < 0.5))


def to_signs(code: jax.Array, length: int) -> jax.Array:
    """The vector of 1 and -1 that `to_bits` made a code of."""
    return 2.0 * jnp.unpackbits(code, count=length) - 1


BITS = hops.Code(to_bits, to_signs)


def twice(
    x: jax.Array, kept: jax.Array, residual: jax.Array, axis: Axis = WORKERS
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The mean of scaled signs, sent on as scaled signs, and what both hops lost.

    Each part of the leaf has the mean of its magnitudes for scale, on both hops.

    Args:
        x: this worker's leaf.
        kept: whether an entry is sent, or stays 0: all workers agree.
        residual: added to the mean of the part that this worker averages.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        The mean; what the first hop lost of x; what the second lost of the own part.
    """
    if not x.size:
        return x, x, residual
    rows = hops.in_parts(kept, axis)
    mine = rows[collectives.index(axis)]
    beside = jnp.concatenate([rows, mine[None]])
    found = hops.all_reduce(x, SCALED, axis, beside, residual)
    mean, lost = (jnp.where(kept, y, 0) for y in (found.mean, x - found.sent))
    return mean, lost, jnp.where(mine, found.lost, 0)


def _to_scaled(x: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    scale = jnp.sum(jnp.abs(x), where=kept) / jnp.maximum(jnp.sum(kept), 1)
    return jnp.packbits(x >= 0), scale


def _from_scaled(code: tuple[jax.Array, jax.Array], length: int) -> jax.Array:
    bits, scale = code
    return scale * to_signs(bits, length)


SCALED = hops.Code(_to_scaled, _from_scaled)
