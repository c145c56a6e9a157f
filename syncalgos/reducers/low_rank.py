"""Reducers that send a matrix as the product of two thin ones."""

import math

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis
from syncalgos.dtypes import if_finite, widen
from syncalgos.reducers import stacking
from syncalgos.reducers.reducer import Reducer, is_sent, over_leaves
from syncalgos.reducers.stacking import Stacked


def power_sgd(
    rank: int = 2,
    seed: int = 0,
    min_rate: float = 2.0,
    stacked: Stacked = 0,
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of matrices, as its rank-r approximation by one power iteration.

    For each leaf of two or more axes, as a matrix M (all axes but the last, the last),
    with Q from the last step, P̂ the orthonormal columns of P:

        P ← mean(M Q);   Q ← mean(Mᵀ P̂);   combined = P̂ Qᵀ

    Of its own M a worker has then sent P̂ P̂ᵀ M.

    Args:
        rank: r, at least 1; a matrix has at most the rank of its shorter side.
        seed: seeds the first Q, normal and alike on all workers.
        min_rate: a matrix is compressed if its entries are more than min_rate times the
            numbers sent for it, at least 0; 0 compresses all.
        stacked: which leaves hold several layers, each a matrix with its own Q (see
            `Stacked`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Reducer. State: Q of each compressed matrix, (columns, r), identical on all
        workers; it does not change at a step whose result is not finite. Each worker
        sends r (rows + columns) numbers of such a matrix, in float32 at least. All
        other leaves are averaged.

    Raises:
        ValueError: a parameter outside its range.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithm 1; the
    rate: PyTorch's hook of that name.
    """
    rank = checks.whole("power_sgd: rank", rank, least=1)
    seed = checks.whole("seed", seed, least=0)
    min_rate = checks.real("power_sgd: min_rate", min_rate, least=0)
    stacked = stacking.check("power_sgd: stacked", stacked)

    def init(params):
        def first(number, x, pieces):
            leading, layer = pieces.leading(x.shape)
            r = _rank(rank, min_rate, layer) if is_sent(x) else 0
            if not r:
                return ()
            key = jax.random.fold_in(jax.random.key(seed), number)
            dtype = widen(jnp.zeros((), x.dtype)).dtype
            return jax.random.normal(key, (*leading, layer[-1], r), dtype)

        of_all = stacking.pieces(stacked, params)
        leaves = zip(map(jnp.asarray, jax.tree.leaves(params)), of_all, strict=True)
        return [first(i, x, pieces) for i, (x, pieces) in enumerate(leaves)]

    # One layer. P and Q in one step, as in the paper; the authors' package takes half
    # an iteration a step, and sends half as much.
    def iterate(x, q):
        matrix = widen(x).reshape(-1, x.shape[-1])
        p, _ = jnp.linalg.qr(collectives.mean(matrix @ q, axis))
        # The worker's own share, which feedback is measured by: with the mean's, as in
        # the authors' first code, the residual takes up what workers differ by.
        own = matrix.T @ p
        new_q = collectives.mean(own, axis)
        combined, sent = (p @ right.T for right in (new_q, own))
        return (
            combined.reshape(x.shape).astype(x.dtype),
            sent.reshape(x.shape).astype(x.dtype),
            # A gradient of zeros leaves a Q of zeros, from which it may not come back.
            jnp.where(jnp.any(new_q != 0), new_q, q),
        )

    def leaf(x, q, pieces):
        if isinstance(q, tuple):
            return collectives.mean(x, axis), x, q
        combined, sent, q = pieces.each(iterate)(pieces.split(x), q)
        return pieces.join(combined), pieces.join(sent), q

    def combine(updates, state, step):
        leaves, form = jax.tree.flatten(updates)
        of_all = stacking.pieces(stacked, updates)
        combined, sent, new = over_leaves(leaf, 3, leaves, state, of_all)
        state = if_finite(combined, new, state)
        return form.unflatten(combined), form.unflatten(sent), state

    return Reducer(combine, init)


def _rank(rank: int, min_rate: float, layer: tuple[int, ...]) -> int:
    """The rank at which a layer is sent; 0 if it is sent whole."""
    if len(layer) < 2:
        return 0
    rows, columns = math.prod(layer[:-1]), layer[-1]
    r = min(rank, rows, columns)
    return r if rows * columns > min_rate * r * (rows + columns) else 0
