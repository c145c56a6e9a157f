"""DiLoCoX: low-rank outer gradients, each with a whole round to arrive."""

from syncalgos import checks, reducers
from syncalgos._anchors import nesterov_sgd
from syncalgos._combinators.primitives import outer_step
from syncalgos._combinators.schedule import every
from syncalgos.reducers._stacking import Layered
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory(static=["min_rate"])
def diloco_x(
    period: int = 16,
    # A round of delay lowers the limit of stability: these values reach 97.2 % on
    # digits; DiLoCo's 0.7 and 0.9 reach 48 %.
    outer_lr: float = 0.4,
    outer_momentum: float = 0.5,
    *,
    rank: int = 4,
    seed: int = 0,
    min_rate: float = 2.0,
    layered: Layered = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """DiLoCoX: outer steps along low-rank outer gradients of the round before.

    After every `period` local steps, for worker i's params θ that began at the anchor,
    C(d) = P̂ P̂ᵀ d, with P̂ and its Q as in `powersgd`, e the residual, and G the mean
    sent a round ago; e, G and m are 0 at first:

        d ← anchor - θ + e;   e ← d - C(d);   m ← μ m + G
        anchor, θ ← anchor - η (G + μ m);   G ← mean(C(d)), used a round later

    Args:
        period: H, local steps between two outer steps, at least 1.
        outer_lr: η, the outer learning rate, above 0.
        outer_momentum: μ, the outer Nesterov momentum, at least 0 and below 1.
        rank: r, the rank of a matrix's outer gradient, at least 1.
        seed: seeds the first factors of the power iteration, identical on all workers.
        min_rate: a matrix is compressed if its entries are more than min_rate times the
            numbers sent for it, at least 0; 0 compresses all.
        layered: which leaves hold several layers, each a separate matrix (see
            `Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the anchor, m and G, identical on all workers, and e, each
        worker's own, shaped like params, at least float32; thin factors of each matrix.
        A sync sends r (rows + columns) numbers of a matrix, and other leaves whole,
        with a whole round to arrive. The center is the anchor. opt_state and buffers
        stay local.

    Raises:
        ValueError: a parameter outside its range.

    When the first round ends, nothing has arrived: the workers restart from the anchor.
    A steady drift moves the center η / (1 - μ) times as far as plain averaging. With
    DiLoCo's η and μ, the delay makes small models oscillate. The factors are float32
    and the rank is fixed; the paper rounds factors to 4 bits, and adapts rank and
    period to the gradients.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import communication, diloco_x
        >>> params = jnp.ones((256, 256))
        >>> for rank in (1, 4, 16):
        ...     strategy = diloco_x(16, rank=rank)
        ...     sent = communication(strategy, params, workers=8, steps=16)
        ...     print(rank, sent.bytes_per_worker)
        1 3584.0
        4 14336.0
        16 57344.0

    Source: Qi et al., "DiLoCoX: a low-communication large-scale training framework for
    decentralized cluster", 2025.

    Family: Late arrivals.
    """
    outer = nesterov_sgd("diloco_x", outer_lr, outer_momentum)
    rank = checks.whole("diloco_x: rank", rank, least=1)
    compressed = reducers.power_sgd(rank, seed=seed, min_rate=min_rate, layered=layered)
    # Error feedback goes inside `late`: a residual must pair with the values sent in
    # the same call.
    feedback = reducers.error_feedback(compressed)
    step = outer_step(outer, reducers.late(feedback), axis=axis)
    return every(step, period)
