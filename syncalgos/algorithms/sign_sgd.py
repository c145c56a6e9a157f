"""Sign SGD: one bit per gradient entry."""

from syncalgos import reducers
from syncalgos._combinators.primitives import reduce_with
from syncalgos.reducers._stacking import Layered
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def sign_sgd(
    *, majority: bool = False, seed: int = 0, layered: Layered = 0, axis: Axis = WORKERS
) -> Strategy:
    """Sign SGD: scaled signs of the gradients with error feedback, or a majority vote.

    At every local step, for worker i's gradients g and its residual e, 0 at first:

        x ← g + e;   d ← mean|x| sign(x), leaf by leaf;   e ← x - d;   g ← mean(d)

    or, with `majority`:

        g ← sign(Σ sign(g))

    Args:
        majority: whether workers vote by signs alone, without scale or feedback.
        seed: seeds the random votes on zeros and ties.
        layered: which leaves hold several layers, each with its own scale (see
            `syncalgos.reducers.Layered`).
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: e, shaped like params, at least float32, each worker's own;
        none with majority. A step gathers one bit per entry from all workers, or sends
        one bit per entry twice, with majority. Replicas stay identical.

    Raises:
        ValueError: a seed or layers outside their range.

    With `majority`, every entry moves by the learning rate at every step, whatever the
    gradient: the rate must be about a hundred times smaller than SGD's. Use `masked` to
    exclude leaves without a gradient. The residual is that of g; in the papers it is
    that of η g (see `topk_sgd`).

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, sign_sgd
        >>> model = np.ones(1000, np.float32)
        >>> for strategy in (sign_sgd(), sign_sgd(majority=True)):
        ...     sent = communication(strategy, model, workers=8, steps=1)
        ...     print(sent.bytes_per_worker, [*sent.by_collective], strategy.unit_steps)
        903.0 ['all_gather'] False
        224.0 ['all_gather', 'all_to_all'] True

    Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient
    compression schemes", ICML 2019, algorithm 2; Seide et al., "1-bit stochastic
    gradient descent", Interspeech 2014; majority: Bernstein et al., "signSGD:
    compressed optimisation for non-convex problems", ICML 2018, algorithm 3.

    Family: Compressed gradients.
    """
    # A vote has no magnitude, so there is no loss to feed back.
    signs = reducers.sign(majority, seed=seed, layered=layered)
    if not majority:
        return reduce_with(reducers.error_feedback(signs), axis=axis)
    return reduce_with(signs, axis=axis)._replace(unit_steps=True)
