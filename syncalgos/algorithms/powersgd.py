"""PowerSGD: low-rank gradients."""

from syncalgos import checks, reducers
from syncalgos._combinators.chain import chain
from syncalgos._combinators.primitives import reduce_with
from syncalgos._combinators.schedule import after, until
from syncalgos.reducers._stacking import Layered
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory(static=["min_rate"])
def powersgd(
    rank: int = 2,
    *,
    seed: int = 0,
    min_rate: float = 2.0,
    dense_steps: int = 0,
    layered: Layered = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """PowerSGD: gradients as products of two thin matrices, with error feedback.

    At every local step, for each matrix of worker i's gradients g, its residual e, 0 at
    first, and Q from the last step, random at first, P̂ the orthonormal columns of P:

        M ← g + e;   P ← mean(M Q);   Q ← mean(Mᵀ P̂);   g ← P̂ Qᵀ;   e ← M - P̂ P̂ᵀ M

    Args:
        rank: r, columns of P and Q, at least 1; 1, 2 or 4 in the paper.
        seed: seeds the first Q, identical on all workers.
        min_rate: a matrix is compressed if its entries are more than min_rate times the
            numbers sent for it, at least 0; 0 compresses all.
        dense_steps: local steps with the plain mean before compression starts, at least
            0; 100 in the authors' code.
        layered: which leaves hold several layers, each a separate matrix (see
            `syncalgos.reducers.Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: e, shaped like params, at least float32, each worker's own,
        and Q, identical on all. A step sends r (rows + columns) numbers of each matrix,
        and other leaves whole. Replicas stay identical.

    Raises:
        ValueError: a parameter outside its range.

    A leaf is the matrix (all axes but the last, the last), as JAX keeps inputs first
    and outputs last. The authors' first code has e ← M - P̂ Qᵀ, which adds the workers'
    differences to e: the gradients are the same, but e drifts.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, powersgd
        >>> matrix = np.ones((100, 100), np.float32)
        >>> for rank in (1, 2, 4):
        ...     sent = communication(powersgd(rank=rank), matrix, workers=2, steps=1)
        ...     print(rank, sent.bytes_per_worker / matrix.nbytes)
        1 0.02
        2 0.04
        4 0.08

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient
    compression for distributed optimization", NeurIPS 2019, algorithms 1 and 2.

    Family: Compressed gradients.
    """
    dense_steps = checks.whole("powersgd: dense_steps", dense_steps, least=0)
    low_rank = reducers.power_sgd(rank, seed=seed, min_rate=min_rate, layered=layered)
    low_rank = reduce_with(reducers.error_feedback(low_rank), axis=axis)
    # The authors' package waits 100 steps, PyTorch's hook 1,000. `after` makes Q and
    # the residual at its first step.
    if not dense_steps:
        return low_rank
    mean = reduce_with("mean", axis=axis)
    return chain(until(mean, dense_steps), after(low_rank, dense_steps))
