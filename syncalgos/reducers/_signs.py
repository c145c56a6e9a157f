"""Reducers that send one bit per entry: its sign."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks, collectives
from syncalgos._dtypes import wide_dtype
from syncalgos.collectives import WORKERS, Axis
from syncalgos.reducers import _hops, _stacking
from syncalgos.reducers._reducer import Reducer, leafwise
from syncalgos.reducers._stacking import Layered
from syncalgos.strategy import factory


@factory
def sign(
    majority: bool = False, *, seed: int = 0, layered: Layered = 0, axis: Axis = WORKERS
) -> Reducer:
    """The mean of scaled signs, or the sign of most workers: one bit per entry.

    Scaled signs: the mean of mean(|x|) sign(x) over the workers, leaf by leaf. The sign
    of 0 is +; error feedback corrects for it. Majority: the sign of the sum of signs,
    regardless of magnitudes. The signs of 0, of NaN and of ties are drawn at random.

    Args:
        majority: whether to vote instead of averaging the scaled signs.
        seed: seeds the votes' draws, which differ between workers.
        layered: which leaves hold several layers, each with its own scale (see
            `Layered`).
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. No state. Scaled signs are gathered from all: (N-1) / 8 bytes per
        entry. Votes take two hops: (N-1) / 4N bytes per entry.

    Raises:
        ValueError: a seed or layers outside their range.

    Source: scaled: Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019,
    algorithm 1; majority: Bernstein et al., "signSGD", ICML 2018, algorithm 3.
    """
    layered = _stacking.check_layered("sign: layered", layered)
    if majority:
        return _hops.drawn(BITS, seed, axis)
    checks.seed(seed)

    # Gathered instead of sent in two hops: a mean of scaled signs is not a sign.
    def average_scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        flat = x.astype(wide_dtype(x.dtype)).reshape(-1)
        scale = jnp.mean(jnp.abs(flat))
        bits = jnp.packbits(flat >= 0)
        codes, scales = collectives.gather((bits, scale), axis)

        # One after the other: in float32 all workers' signs take 32 times the memory of
        # their codes.
        def add(total: jax.Array, message: Any) -> tuple[jax.Array, None]:
            code, scale = message
            return total + scale * to_signs(code, x.size).astype(flat.dtype), None

        total, _ = jax.lax.scan(add, jnp.zeros_like(flat), (codes, scales))
        combined = total / len(scales)
        sent_leaf = scale * jnp.where(flat >= 0, 1.0, -1.0)
        return combined.reshape(x.shape), sent_leaf.reshape(x.shape)

    return leafwise(average_scaled, layered)


@factory
def tally(seed: int = 0, *, axis: Axis = WORKERS) -> Reducer:
    """The mean of the workers' signs: the votes of `sign(majority=True)`, counted.

    The signs of 0 and of NaN are drawn.

    Args:
        seed: seeds these draws, which differ between workers.
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

    Returns:
        A Reducer. No state. Each worker sends a bit per entry, then the counts of its
        part as whole numbers: 9 (N-1) / 8N bytes per entry below 256 workers.

    Raises:
        ValueError: a seed outside its range.

    Source: Liu et al., "Distributed Lion", NeurIPS 2024, its averaged signs.
    """

    def to_count(mean: jax.Array, draws: jax.Array) -> jax.Array:
        workers = collectives.size(axis)
        dtype = np.min_scalar_type(workers)
        return jnp.round((mean + 1) / 2 * workers).astype(dtype)

    def to_mean(count: jax.Array, length: int) -> jax.Array:
        workers = collectives.size(axis)
        return (2.0 * count - workers) / workers

    return _hops.drawn(BITS, seed, axis, second=_hops.Code(to_count, to_mean))


def to_bits(x: jax.Array, draws: jax.Array) -> jax.Array:
    """Packs the signs of a vector into bytes; those of 0 and of NaN are drawn."""
    collectives.no_mean("a vote")
    # If 0 counted as +, ties of an even number of workers would move entries.
    return jnp.packbits(jnp.where((x > 0) | (x < 0), x > 0, draws < 0.5))


def to_signs(code: jax.Array, length: int) -> jax.Array:
    """Reads the vector of 1 and -1 from a code of `to_bits`."""
    return 2.0 * jnp.unpackbits(code, count=length).astype(float) - 1


BITS = _hops.Code(to_bits, to_signs)


def mean_of_signs(
    x: jax.Array, is_live: jax.Array, residual: jax.Array, axis: Axis = WORKERS
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The mean of scaled signs, sent as scaled signs again, and both hops' losses.

    On both hops the scale of a part of the leaf is the mean of its magnitudes. The bit
    of an entry that is not live says whether it is 0.

    Args:
        x: this worker's leaf.
        is_live: whether an entry is sent, or its mean is 0; identical on all workers.
        residual: added to the mean of the part that this worker averages, (part,).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        The mean; the loss of x on the first hop; a magnitude for entries that are not
        live, above 0 if any worker's is not 0, and identical on all; the loss of this
        worker's part on the second hop.
    """
    collectives.no_mean("a mean of the workers' own momenta")
    if not x.size:
        return x, x, x, residual
    rows = _hops.split_into_parts(is_live, axis)  # (workers, part)
    own_row = rows[collectives.index(axis)]
    extras = jnp.concatenate([rows, own_row[None]])  # (workers + 1, part)
    marked = jnp.where(is_live, x, jnp.where(x == 0, -1, jnp.abs(x)))
    result = _hops.average_coded(
        marked, SCALED, axis, extras, residual, takes_largest=~own_row
    )
    waiting = jnp.where(is_live, 0, jnp.maximum(result.mean, 0))
    lost = jnp.where(is_live, x - result.sent_leaf, jnp.where(waiting > 0, x, 0))
    mean = jnp.where(is_live, result.mean, 0)
    return mean, lost, waiting, jnp.where(own_row, result.lost, 0)


def _to_scaled(x: jax.Array, is_live: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The paper takes the root mean square, but then errors can grow: for a one-hot
    # vector of 16 entries its squared error is 1.5 times the vector's square; with the
    # mean magnitude it is 0.94 times.
    # A part in which all live entries are 0 takes the scale of the others.
    is_counted = jnp.where(jnp.any(is_live & (x != 0)), is_live, x > 0)
    count = jnp.maximum(jnp.sum(is_counted), 1).astype(x.dtype)
    bits = jnp.packbits(jnp.where(is_live, x >= 0, x > 0))
    return bits, jnp.sum(jnp.abs(x), where=is_counted) / count


def _from_scaled(code: tuple[jax.Array, jax.Array], length: int) -> jax.Array:
    bits, scale = code
    signs = to_signs(bits, length)
    return scale.astype(signs.dtype) * signs


SCALED = _hops.Code(_to_scaled, _from_scaled)
