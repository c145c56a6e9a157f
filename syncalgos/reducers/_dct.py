"""The discrete cosine transform of an array, chunk by chunk, and DeMo's reducer."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import collectives
from syncalgos.collectives import WORKERS, Axis
from syncalgos.reducers import _hops
from syncalgos.reducers._reducer import Reducer, leafwise
from syncalgos.reducers._stacking import Layered, shards


def components(
    x: jax.Array, longest: int
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns each chunk's orthonormal cosine components (type II), and an inverse.

    Args:
        x: an array that is not empty; one of more than two axes is taken as the matrix
            (all axes but the last, the last).
        longest: the longest side of a chunk (see `side`).

    Returns:
        The components, (chunks, entries of a chunk), and a function from such
        components to an array of x's shape.
    """
    matrix = x.reshape(-1, x.shape[-1]) if x.ndim > 2 else jnp.atleast_1d(x)
    sides = [side(n, longest) for n in matrix.shape]
    counts = [-(-n // s) for n, s in zip(matrix.shape, sides, strict=True)]
    padding = [(0, -n % s) for n, s in zip(matrix.shape, sides, strict=True)]
    bases = [_basis(n) for n in sides]
    chunks = _multiply_axes(shards.split_array(jnp.pad(matrix, padding), counts), bases)

    def invert(flat: jax.Array) -> jax.Array:
        parts = _multiply_axes(flat.reshape(-1, *sides), [basis.T for basis in bases])
        padded = shards.join_array(parts, counts)
        return padded[tuple(map(slice, matrix.shape))].reshape(x.shape)

    return chunks.reshape(len(chunks), -1), invert


def largest_components(
    chunk: int, count: int, layered: Layered = 0, axis: Axis = WORKERS
) -> Reducer:
    """The mean of each chunk's largest components, over the workers that sent them.

    Args:
        chunk: the longest side of a chunk, at least 1 (see `side`).
        count: components of a chunk that are sent, at least 1.
        layered: which leaves hold several layers, each cut by itself (see `Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Reducer. No state. Each worker gathers the others' values and their indices,
        of 16 bits. Leaves whose chunks have at most `count` components are averaged.

    Source: Peng, Quesnelle and Kingma, "DeMo", 2024, algorithm 1.
    """

    def combine(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        collectives.no_mean("a mean over the senders of a component")
        chunks, invert = components(x, chunk)  # (chunks, components)
        # All are sent: no index is needed.
        if chunks.shape[1] <= count:
            return collectives.mean(x, axis), x
        _, chosen = jax.lax.top_k(jnp.abs(chunks), count)
        q = jnp.take_along_axis(chunks, chosen, axis=1)  # (chunks, count)
        short_indices = chosen.astype(_hops.index_dtype(chunks.shape[1]))
        indices, values = collectives.gather((short_indices, q), axis)
        rows = jnp.arange(len(chunks))[:, None]
        zeros = jnp.zeros_like(chunks)
        entries = rows, indices.astype(jnp.int32)  # (workers, chunks, count)
        # As in the authors' code. A mean over all workers, as in the SparseLoCo paper,
        # would keep error feedback exact.
        senders = zeros.at[entries].add(1.0)
        mean = zeros.at[entries].add(values) / jnp.maximum(senders, 1)
        return invert(mean), invert(zeros.at[rows, chosen].set(q))

    return leafwise(combine, layered)


def side(length: int, longest: int) -> int:
    """The length of the parts that an axis is cut into, at most the longest.

    It is the largest divisor, as in the authors' code, unless that is below a quarter
    of the longest: then parts are nearly equal, and zeros fill the last.
    """
    # A prime has the divisor 1: chunks of a few entries would send nearly all of them.
    divisor = max(s for s in range(1, min(length, longest) + 1) if length % s == 0)
    if 4 * divisor >= min(length, longest):
        return divisor
    return -(-length // -(-length // longest))


def _basis(size: int) -> np.ndarray:
    """The orthonormal cosine vectors of a length, in rows."""
    # Chunks are short: a product compiles much faster than Fourier transforms do.
    row = np.arange(size)[:, None]
    column = np.arange(size)
    cosines = np.cos(np.pi / size * (column + 0.5) * row) * np.sqrt(2 / size)
    cosines[0] /= np.sqrt(2)
    return cosines


def _multiply_axes(x: jax.Array, matrices: list[np.ndarray]) -> jax.Array:
    """Multiplies each axis of a chunk by a matrix; the axes stay in their places.

    Args:
        x: (chunks, side) or (chunks, side, side).
        matrices: (side, side) for each axis, of the cosines or its transpose.
    """
    *row_matrices, column_matrix = (jnp.asarray(m, x.dtype) for m in matrices)
    # One product for each chunk: a single product for all would transpose them twice.
    for matrix in row_matrices:
        repeated = jnp.broadcast_to(matrix, (len(x), *matrix.shape))
        x = jnp.matmul(repeated, x, precision="highest")
    return jnp.matmul(x, column_matrix.T, precision="highest")
