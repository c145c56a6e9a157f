"""Synchronous data-parallel training."""

from syncalgos.combinators.primitives import reduce_with
from syncalgos.reducers import AnyReducer, resolve
from syncalgos.strategy import WORKERS, Axis, Strategy


def sync_sgd(
    *, reduce: AnyReducer = "mean", seed: int = 0, axis: Axis = WORKERS
) -> Strategy:
    """Synchronous SGD: every worker steps along the mean gradient.

    At every local step, for workers' gradients g:

        g ← reduce(g)

    Args:
        reduce: how gradients are sent: mean, bf16, fp16, int8, int4 or int2; or median,
            trimmed or clipped, robust against wrong workers; on the command line also
            row_sparse, for a task with tables; in Python also a reducer of one's own.
        seed: seeds the random rounding to int8, int4 or int2.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. No state, but of clipped its last result. Each step sends gradients
        once. Replicas stay identical. With the mean, results do not depend on the
        number of workers, up to rounding. Batch statistics stay local; the center holds
        their mean.

    Raises:
        ValueError: an unknown reducer.

    Source: Chen et al., "Revisiting distributed synchronous SGD", 2016.
    """
    return reduce_with(resolve("sync_sgd", reduce, axis, seed), axis)
