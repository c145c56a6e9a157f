"""Top-k sparsified SGD."""

from syncalgos import reducers
from syncalgos._combinators.primitives import reduce_with
from syncalgos.reducers._stacking import Layered
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory(static=["density"])
def topk_sgd(
    density: float = 0.01,
    *,
    feedback: bool = True,
    layered: Layered = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """Top-k SGD: the gradients' largest entries, with error feedback.

    At every local step, for worker i's gradients g and its residual e, 0 at first,
    where TopK sets all but the largest magnitudes of a leaf to 0:

        x ← g + e;   d ← TopK(x);   e ← x - d;   g ← mean(d)

    Args:
        density: the share of each leaf's entries that is sent, rounded up; above 0, at
            most 1.
        feedback: whether unsent parts are added to the next gradients. Without it,
            entries never move if they are never among the largest.
        layered: which leaves hold several layers, each with this share of entries sent
            (see `syncalgos.reducers.Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: e, shaped like params, at least float32, each worker's own;
        none without feedback. A step gathers the chosen values and their indices from
        all workers; an index has 16 bits in leaves of at most 65,536 entries, else 32.
        Replicas stay identical.

    Raises:
        ValueError: a density outside its range.

    The papers keep the residual of η g; here it is that of g. Both agree at a constant
    learning rate η. Otherwise a late entry moves here at the rate of the step that
    sends it.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, topk_sgd
        >>> model = np.ones(1000, np.float32)
        >>> for workers in (2, 8):  # gathered from all: more workers send more
        ...     sent = communication(topk_sgd(), model, workers=workers, steps=1)
        ...     print(workers, sent.bytes_per_worker)
        2 60.0
        8 420.0

    Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018,
    algorithm 2; Aji and Heafield, "Sparse communication for distributed gradient
    descent", EMNLP 2017.

    Family: Compressed gradients.
    """
    largest = reducers.top_k(density, layered=layered)
    if feedback:
        largest = reducers.error_feedback(largest)
    return reduce_with(largest, axis=axis)
