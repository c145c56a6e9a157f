"""MuLoCo: DiLoCo around Muon."""

from syncalgos import checks, reducers
from syncalgos._anchors import nesterov_sgd
from syncalgos._combinators.primitives import outer_step
from syncalgos._combinators.schedule import every
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def muloco(
    period: int = 16,
    outer_lr: float = 0.9,
    outer_momentum: float = 0.8,
    *,
    reduce: reducers.AnyReducer = "mean",
    decay: float | None = None,
    seed: int = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """MuLoCo: DiLoCo around Muon, with its own outer rates and error feedback.

    After every `period` local steps of Muon, for worker i's params θ that began at the
    anchor, its residual e, 0 at first as m is, and Q the compression by `reduce`:

        e ← β e + (anchor - θ);   d ← Q(e);   e ← e - d;   g ← Q(mean(d))
        m ← μ m + g;   anchor, θ ← anchor - η (g + μ m)

    Args:
        period: H, local steps between two outer steps, at least 1; 30 in the paper.
        outer_lr: η, the outer learning rate, above 0. The authors take η = 0.7 and μ =
            0.6 for one worker, 0.9 and 0.8 for two, 1 and 0.9 for 16.
        outer_momentum: μ, the outer Nesterov momentum, at least 0 and below 1.
        reduce: how outer gradients are sent: mean, bf16, fp16, int8, int4 or int2; or,
            without decay, median, trimmed or clipped, robust against wrong workers; in
            Python also your own reducer.
        decay: β, the decay of the residual e, above 0 and at most 1; None means no
            error feedback.
        seed: seeds the random rounding to int8, int4 or int2.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the anchor and m, identical on all workers, and, with decay,
        e, each worker's own, shaped like params, at least float32. A sync sends params
        once, or as `reduce` does. The center is the anchor. opt_state and buffers stay
        local.

    Raises:
        ValueError: a parameter outside its range.

    A steady drift moves the center η / (1 - μ) times as far as plain averaging: 4.5
    times with the defaults. Pass the inner optimizer yourself: `optax.contrib.muon`.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import communication, muloco
        >>> for reduce in ("mean", "int8", "int2"):
        ...     strategy = muloco(30, reduce=reduce, decay=0.9)
        ...     sent = communication(strategy, jnp.ones((64, 64)), workers=8, steps=30)
        ...     print(reduce, sent.bytes_per_worker)
        mean 28672.0
        int8 7224.0
        int2 1848.0

    Source: Thérien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo",
    2025, algorithm 1; η and μ as in the authors' code.

    Family: Outer momentum.
    """
    outer = nesterov_sgd("muloco", outer_lr, outer_momentum)
    reducer = reducers.resolve("muloco", reduce, axis, seed)
    if decay is not None:
        decay = checks.share("muloco: decay", decay)
        # The authors' code multiplies what is fed back by η twice; here it is once.
        reducer = reducers.error_feedback(reducer, decay=decay)
    return every(outer_step(outer, reducer, axis=axis), period)
