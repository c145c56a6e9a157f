"""SparseLoCo: sparse outer gradients, with error feedback instead of outer momentum."""

from typing import Literal

import optax

from syncalgos import checks, reducers
from syncalgos._combinators.primitives import outer_step
from syncalgos._combinators.schedule import every
from syncalgos.reducers._stacking import Layered
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory(static=["density"])
def sparseloco(
    period: int = 16,
    density: float = 1 / 64,
    *,
    decay: float = 0.95,
    outer_lr: float = 1.0,
    bits: Literal[8, 4, 2] | None = 2,
    chunk: int = 4096,
    layered: Layered = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """SparseLoCo: the largest entries of the outer gradients, with decayed feedback.

    After every `period` local steps, for worker i's params θ that began at the anchor,
    its residual e, 0 at first, TopK the largest entries of each chunk, all others being
    0, and Q each entry's bin, read as the mean of the values in it:

        e ← β e + (anchor - θ);   d ← Q(TopK(e));   e ← e - d
        anchor, θ ← anchor - α mean(d)

    Args:
        period: H, local steps between two outer steps, at least 1; 30 in the paper.
        density: the share of each chunk's entries that is sent, rounded up; above 0, at
            most 1.
        decay: β, the decay of the residual, in place of an outer momentum; above 0, at
            most 1.
        outer_lr: α, the outer learning rate, above 0.
        bits: 8, 4 or 2 bits per value, for one of 2^bits equal bins over six standard
            deviations around the mean of a leaf's chosen values; None sends values
            whole.
        chunk: the largest chunk, at least 1 entry; leaves are cut into equal chunks.
        layered: which leaves hold several layers, each cut by itself (see
            `syncalgos.reducers.Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the anchor, identical on all workers, and e, each worker's
        own, shaped like params, at least float32. A sync gathers the chosen entries'
        bins and 12-bit indices, and the bins' means, from all workers. The center is
        the anchor. opt_state and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    A steady drift moves the center up to α times as far as plain averaging: α if
    nothing decays before it is sent. The authors' chunks are tiles of 64 × 64, and they
    average an entry over the workers that sent it.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, sparseloco
        >>> model = np.ones((64, 64), np.float32)
        >>> sent = communication(sparseloco(30), model, workers=2, steps=30)
        >>> round(30 * model.nbytes / sent.bytes_per_worker)  # times less than sync_sgd
        3840

    Source: Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo",
    2025, algorithm 1.

    Family: Little at a time.
    """
    lr = checks.real("sparseloco: outer_lr", outer_lr, above=0)
    # The mean is over all workers, as in the paper: then error feedback keeps sums
    # exact. The authors' code first shrinks each worker's values to the median of their
    # norms, then averages over an entry's senders.
    largest = reducers.chunked_top_k(density, bits=bits, chunk=chunk, layered=layered)
    feedback = reducers.error_feedback(largest, decay=decay)
    return every(outer_step(optax.sgd(lr), feedback, axis=axis), period)
