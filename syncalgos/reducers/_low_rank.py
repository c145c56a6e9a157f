"""Reducers that send a matrix as the product of two thin ones."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._dtypes import if_finite, root, widen
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.reducers import _stacking
from syncalgos.reducers._reducer import Reducer, count_share, is_sent
from syncalgos.reducers._stacking import Layered
from syncalgos.strategy import factory


@factory
def power_sgd(
    rank: int = 2,
    *,
    seed: int = 0,
    min_rate: float = 2.0,
    layered: Layered = 0,
    axis: Axis = WORKERS,
) -> Reducer:
    """The mean of matrices, as its rank-r approximation by one power iteration.

    For each leaf of two or more axes, as a matrix M (all axes but the last, the last),
    with Q from the last step, and P̂ the orthonormal columns of P:

        P ← mean(M Q);   Q ← mean(Mᵀ P̂);   combined = P̂ Qᵀ

    The part that a worker has sent of its own M is P̂ P̂ᵀ M.

    Args:
        rank: r, at least 1; a matrix has at most the rank of its shorter side.
        seed: seeds the first Q, normal and identical on all workers.
        min_rate: a matrix is compressed if its entries are more than min_rate times the
            numbers sent for it, at least 0; 0 compresses all.
        layered: which leaves hold several layers, each a matrix with its own Q (see
            `Layered`).
        axis: the mapped axis or axes over which the workers lie; by default those of
            the strategy around it.

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
    seed = checks.seed(seed)
    checks.untraced("power_sgd: min_rate", min_rate)
    min_rate = checks.real("power_sgd: min_rate", min_rate, least=0)
    layered = _stacking.check_layered("power_sgd: layered", layered)

    def find_rank(rows: int, columns: int) -> int:
        r = min(rank, rows, columns)
        return r if rows * columns > min_rate * r * (rows + columns) else 0

    return _power_iteration(find_rank, _product, seed, layered, axis)


def orthonormal_steps(
    rank_fraction: float, seed: int = 0, layered: Layered = 0, axis: Axis = WORKERS
) -> Reducer:
    """Steps of Dion: the matrices of `power_sgd`, with singular values of about 1.

    With P̂ and Q as in `power_sgd`:

        combined = √(columns / rows) P̂ (Q, each column divided by its norm)ᵀ

    The part that a worker has sent of its own M is P̂ P̂ᵀ M; the mean of these parts is
    P̂ Qᵀ.

    Args:
        rank_fraction: the rank as a share of a matrix's shorter side, rounded up; above
            0, at most 1.
        seed: seeds the first Q, normal and identical on all workers.
        layered: which leaves hold several layers, each a matrix with its own Q (see
            `Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Reducer. Its state and the numbers that it sends are those of `power_sgd`. All
        other leaves are averaged.
    """

    def rank(rows: int, columns: int) -> int:
        return count_share(rank_fraction, min(rows, columns))

    return _power_iteration(rank, _unit_product, seed, layered, axis)


def _power_iteration(
    rank: Callable[[int, int], int],
    product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    seed: int,
    layered: Layered,
    axis: Axis,
) -> Reducer:
    """A reducer by one power iteration a step.

    Args:
        rank: the sides of a layer -> the rank at which it is sent; 0 if averaged.
        product: (P̂, Q, layer) -> the combined layer.
        seed: seeds the first Q.
        layered: which leaves hold several layers.
        axis: the mapped axis or axes over which the workers lie.
    """

    def init(params: PyTree) -> list[Any]:
        def draw_q(number: int, x: jax.Array, pieces: _stacking.Pieces) -> Any:
            leading_axes, layer = pieces.leading(x.shape)
            if not is_sent(x) or len(layer) < 2:
                return ()
            r = rank(math.prod(layer[:-1]), layer[-1])
            if not r:
                return ()
            key = jax.random.fold_in(jax.random.key(seed), number)
            dtype = widen(jnp.zeros((), x.dtype)).dtype
            return jax.random.normal(key, (*leading_axes, layer[-1], r), dtype)

        leaves = [*map(jnp.asarray, jax.tree.leaves(params))]
        leaf_pieces = _stacking.pieces(layered, params)
        return [*map(draw_q, range(len(leaves)), leaves, leaf_pieces)]

    # P and Q in one step, as in the paper; the authors' package takes half an iteration
    # a step, and sends half as much. All leaves' P are sent together, then everything
    # else. Values are found by the numbers of their leaves.
    def combine(
        updates: PyTree, state: list[Any], step: Any
    ) -> tuple[PyTree, PyTree, list[Any]]:
        leaves, form = jax.tree.flatten(jax.tree.map(jnp.asarray, updates))
        leaf_pieces = _stacking.pieces(layered, updates)
        dense: dict[int, jax.Array] = {}
        layers: dict[int, jax.Array] = {}  # (*pieces, rows …, columns)
        for i, x in enumerate(leaves):
            if isinstance(state[i], tuple):
                dense[i] = x
                leaf_pieces[i] = _stacking.Pieces(0)
            else:
                layers[i] = leaf_pieces[i].split(x)

        def map_layers(function: Callable[..., Any], *values: Any) -> dict[int, Any]:
            results = {}
            for i in layers:
                arguments = [value[i] for value in values]
                results[i] = leaf_pieces[i].map(function)(*arguments)
            return results

        def join_leaves(values: dict[int, jax.Array]) -> PyTree:
            joined = [x.join(values[i]) for i, x in enumerate(leaf_pieces)]
            return form.unflatten(joined)

        products = map_layers(_multiply_by_q, layers, state)  # M Q, (rows, r)
        mean_products = _stacking.means(leaf_pieces, products, axis)
        bases = map_layers(_orthonormalize, mean_products)  # P̂
        # The worker's own share, from which feedback is computed. With the mean's
        # share, as in the authors' first code, the residual would add up the workers'
        # differences.
        own_factors = map_layers(_multiply_by_basis, layers, bases)  # Mᵀ P̂
        means = _stacking.means(leaf_pieces, {**own_factors, **dense}, axis)
        combined_layers = map_layers(product, bases, means, layers)
        combined = join_leaves({**means, **combined_layers})
        sent_layers = map_layers(_product, bases, own_factors, layers)
        sent_updates = join_leaves({**dense, **sent_layers})
        next_qs = map_layers(_choose_next_q, means, state)
        new_state = [next_qs.get(i, q) for i, q in enumerate(state)]
        return combined, sent_updates, if_finite(combined, new_state, state)

    return Reducer(combine, init)


def _multiply_by_q(x: jax.Array, q: jax.Array) -> jax.Array:
    """Returns M Q of a layer, (rows, r)."""
    return widen(x).reshape(-1, x.shape[-1]) @ q


@jax.custom_jvp
def _orthonormalize(p: jax.Array) -> jax.Array:
    """Returns P̂, an orthonormal basis of the columns of P, (rows, r)."""
    return jnp.linalg.qr(p)[0]


@_orthonormalize.defjvp
def _differentiate_basis(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The derivative of P̂, where columns that depend on others only keep apart."""
    [p] = primals
    [move] = tangents
    basis, r = jnp.linalg.qr(p)
    # Their directions are rounding errors: divided by these, derivatives explode.
    sizes = jnp.abs(jnp.diagonal(r))
    free = sizes > jnp.max(sizes) * max(p.shape) * jnp.finfo(p.dtype).eps
    r = jnp.where(free & free[:, None], r, jnp.eye(len(r), dtype=r.dtype))
    move = jnp.where(free, move, 0)
    change = jax.scipy.linalg.solve_triangular(r, move.T, trans="T").T  # (rows, r)
    inside = basis.T @ change
    lower = jnp.tril(inside, -1)
    return basis, basis @ (lower - lower.T - inside) + change


def _multiply_by_basis(x: jax.Array, p: jax.Array) -> jax.Array:
    """Returns Mᵀ P̂ of a layer, (columns, r)."""
    return widen(x).reshape(-1, x.shape[-1]).T @ p


def _product(p: jax.Array, q: jax.Array, like: jax.Array) -> jax.Array:
    """Returns P̂ Qᵀ in the shape and dtype of a layer."""
    return (p @ q.T).reshape(like.shape).astype(like.dtype)


def _unit_product(p: jax.Array, q: jax.Array, like: jax.Array) -> jax.Array:
    """Returns √(columns / rows) P̂ Qᵀ, of Q with columns of norm 1."""
    q = q / (root(jnp.sum(q**2, axis=0, keepdims=True)) + 1e-8)
    scale = (like.shape[-1] / math.prod(like.shape[:-1])) ** 0.5
    return _product(scale * p, q, like)


def _choose_next_q(new: jax.Array, q: jax.Array) -> jax.Array:
    """Returns the Q to begin the next step with."""
    # A gradient of zeros gives a Q of zeros, which may stay zero for good.
    return jnp.where(jnp.any(new != 0), new, q)
