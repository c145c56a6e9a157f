"""Synchronous data-parallel training."""

from syncalgos._combinators.primitives import reduce_with
from syncalgos.reducers import AnyReducer, resolve
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def sync_sgd(
    *, reduce: AnyReducer = "mean", seed: int = 0, axis: Axis = WORKERS
) -> Strategy:
    """Synchronous SGD: every worker steps along the mean gradient.

    At every local step, for workers' gradients g, along which each inner optimizer then
    steps; reduce is their mean by default:

        g ← reduce(g)

    Args:
        reduce: how gradients are sent: mean, bf16, fp16, int8, int4 or int2; or median,
            trimmed or clipped, robust against wrong workers; in Python also your own
            reducer.
        seed: seeds the random rounding to int8, int4 or int2.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. No state; with clipped, its last result. Each step sends gradients
        once. Replicas stay identical. With the mean, results do not depend on the
        number of workers, up to rounding. Batch statistics stay local; the center holds
        their mean.

    Raises:
        ValueError: an unknown reducer.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, sync_sgd
        >>> def loss(w, x):
        ...     return ((w - x) ** 2).mean()
        >>> for n in (1, 4):
        ...     trainer = DataParallel(loss, optax.sgd(0.1), sync_sgd(), workers=n)
        ...     state = trainer.init(jnp.float32(0))
        ...     state, _ = trainer.run(state, jnp.tile(jnp.arange(8.0), (3, 1)))
        ...     print(round(float(trainer.center(state).params), 3))
        1.708
        1.708

    Source: Chen et al., "Revisiting distributed synchronous SGD", 2016.

    Family: Gradients at every step.
    """
    return reduce_with(resolve("sync_sgd", reduce, axis, seed), axis=axis)
