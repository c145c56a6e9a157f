"""DiLoCo: an outer optimizer on the pseudo-gradient."""

from syncalgos._anchors import nesterov_sgd
from syncalgos._combinators.primitives import outer_step
from syncalgos._combinators.schedule import every
from syncalgos.reducers import AnyReducer, resolve
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def diloco(
    period: int = 16,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    *,
    reduce: AnyReducer = "mean",
    seed: int = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """DiLoCo: outer SGD with Nesterov momentum on the pseudo-gradient.

    After every `period` local steps, for workers' params θ that began at the anchor,
    and m, 0 at first:

        g ← reduce(anchor - θ);   m ← μ m + g;   anchor, θ ← anchor - η (g + μ m)

    Args:
        period: H, local steps between two outer steps, at least 1; 500 in the paper.
        outer_lr: η, the outer learning rate, above 0.
        outer_momentum: μ, the outer Nesterov momentum, at least 0 and below 1.
        reduce: how outer gradients are sent: mean, bf16, fp16, int8, int4 or int2; or
            median, trimmed or clipped, robust against wrong workers; in Python also
            your own reducer.
        seed: seeds the random rounding to int8, int4 or int2.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the anchor and m, shaped like params, at least float32,
        identical on all workers. A sync sends params once, or as `reduce` does. The
        center is the anchor. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    A steady drift moves the center η / (1 - μ) times as far as plain averaging: 7 times
    with the defaults. The paper's inner optimizer is AdamW. For another outer
    optimizer, use `every(outer_step(optimizer), period)`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, diloco
        >>> def loss(w, x):
        ...     return ((w - x) ** 2).mean()
        >>> trainer = DataParallel(loss, optax.sgd(0.01), diloco(10), workers=4)
        >>> state = trainer.init(jnp.float32(0))
        >>> state, _ = trainer.run(state, jnp.tile(jnp.arange(4.0), (1000, 1)))
        >>> round(float(trainer.center(state).params), 3)
        1.5

    Source: Douillard et al., "DiLoCo: distributed low-communication training of
    language models", 2023, algorithm 1.

    Family: Outer momentum.
    """
    outer = nesterov_sgd("diloco", outer_lr, outer_momentum)
    reducer = resolve("diloco", reduce, axis, seed)
    return every(outer_step(outer, reducer, axis=axis), period)
