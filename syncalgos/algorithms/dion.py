"""Dion: orthonormal steps of low rank, along momentum with error feedback."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos._dtypes import if_finite, narrow, widen, zeros
from syncalgos.reducers import _low_rank, _stacking
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    PyTree,
    Replica,
    Strategy,
    factory,
)


class DionState(NamedTuple):
    """The momentum, M or Lion's m, and Q of each matrix."""

    momentum: PyTree
    factors: PyTree


@factory(static=["rank_fraction"])
def dion(
    rank_fraction: float = 0.25,
    local_momentum: float = 0.95,
    *,
    seed: int = 0,
    layered: _stacking.Layered = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """Dion: orthonormal steps of low rank for matrices, Lion for all other leaves.

    At every local step, for each matrix of worker i's gradients g, its momentum M, 0 at
    first as m is, and Q from the last step, random at first, P̂ the orthonormal columns
    of P:

        B ← M + g;   P ← mean(B Q);   R ← mean(Bᵀ P̂);   M ← B - (1 - μ) P̂ P̂ᵀ B
        Q ← R, each column divided by its norm + 1e-8;   g ← √(columns / rows) P̂ Qᵀ
        all other leaves: d ← 0.95 m + 0.05 mean(g);   m ← 0.98 m + 0.02 mean(g)
            g ← sign(d)

    Args:
        rank_fraction: the columns of P and Q as a share of a matrix's shorter side,
            rounded up; above 0, at most 1.
        local_momentum: μ, the share of the sent part that M keeps, at least 0 and below
            1.
        seed: seeds the first Q, identical on all workers.
        layered: which leaves hold several layers, each a separate matrix (see
            `syncalgos.reducers.Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: M, each worker's own, m and Q, identical on all, at least
        float32. A step sends P and R of each matrix, r (rows + columns) numbers for r
        columns, and other leaves whole. Replicas stay identical.

    Raises:
        ValueError: a parameter outside its range.

    The inner optimizer is plain SGD, at a rate of 0.02 in the paper, whatever the size
    of the model. The authors take Lion for embeddings and the last layer, too:
    `chain(masked(dion(), hidden), masked(distributed_lion(), others))` does so.

    A leaf is the matrix (all axes but the last, the last); the authors' code takes P of
    the longer side. It has M ← B - (1 - μ) P̂ Rᵀ, which adds the workers' differences
    to M: the steps are the same, but M drifts.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, dion
        >>> matrix = np.ones((128, 128), np.float32)
        >>> for fraction in (1 / 4, 1 / 16):
        ...     strategy = dion(rank_fraction=fraction)
        ...     sent = communication(strategy, matrix, workers=2, steps=1)
        ...     print(sent.bytes_per_worker / matrix.nbytes)
        0.5
        0.125

    Source: Ahn et al., "Dion: distributed orthonormalized updates", 2025, and the
    authors' code.

    Family: Compressed gradients.
    """
    checks.untraced("dion: rank_fraction", rank_fraction)
    rank_fraction = checks.share("dion: rank_fraction", rank_fraction)
    mu = checks.real("dion: local_momentum", local_momentum, least=0, below=1)
    layered = _stacking.check_layered("dion: layered", layered)
    reducer = _low_rank.orthonormal_steps(
        rank_fraction, checks.seed(seed), layered, axis
    )

    def init(params: PyTree) -> DionState:
        return DionState(zeros(params), reducer.init(params))

    def is_matrix(x: jax.Array, pieces: _stacking.Pieces) -> bool:
        return x.ndim - pieces.layers > 1

    def accumulate(g: jax.Array, m: jax.Array, pieces: _stacking.Pieces) -> jax.Array:
        return m + g if is_matrix(g, pieces) else g

    def step_leaf(
        g: jax.Array,
        b: jax.Array,
        sent_momentum: jax.Array,
        m: jax.Array,
        pieces: _stacking.Pieces,
    ) -> tuple[jax.Array, jax.Array]:
        if is_matrix(g, pieces):
            return g, b - (1 - mu) * sent_momentum
        return jnp.sign(0.95 * m + 0.05 * g), 0.98 * m + 0.02 * g

    def reduce(
        grads: PyTree, replica: Replica, state: DionState, step: Any
    ) -> tuple[PyTree, DionState]:
        collectives.no_mean("a mean of the workers' own momenta")
        pieces = _stacking.pieces_like(layered, grads)
        inputs = jax.tree.map(accumulate, widen(grads), state.momentum, pieces)
        combined, sent_momentum, factors = reducer.combine(inputs, state.factors, step)
        steps, momentum = over_leaves(
            step_leaf, 2, combined, inputs, sent_momentum, state.momentum, pieces
        )
        new_state = if_finite(combined, DionState(momentum, factors), state)
        return narrow(steps, grads), new_state

    return Strategy(init, reduce, center=MeanCenter(axis), own_momentum=True)
