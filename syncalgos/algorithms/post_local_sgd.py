"""Post-local SGD: synchronous first, local later."""

from syncalgos import checks
from syncalgos._combinators.chain import chain
from syncalgos._combinators.schedule import after, until
from syncalgos.algorithms.model_averaging import model_averaging
from syncalgos.algorithms.sync_sgd import sync_sgd
from syncalgos.strategy import WORKERS, Axis, Strategy, factory


@factory
def post_local_sgd(
    dense_steps: int = 100, period: int = 16, *, axis: Axis = WORKERS
) -> Strategy:
    """Post-local SGD: synchronous SGD at first, then model averaging.

    For workers' gradients g and params θ, at local steps t = 0, 1, …:

        t < dense_steps: g ← mean(g)
        later, after multiples of `period`: θ ← mean(θ)

    Args:
        dense_steps: the first local step, from 0, without synchronous gradients; at
            least 0.
        period: local steps between two averages, counted from step 0 of training; at
            least 1.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. No state. A synchronous step sends gradients once; a later sync
        sends params once. The center is the mean of the replicas. opt_state and buffers
        stay local.

    Raises:
        ValueError: a parameter outside its range.

    The paper begins model averaging at the first decay of the learning rate, halfway
    through training.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, post_local_sgd
        >>> strategy = post_local_sgd(dense_steps=3, period=8)
        >>> sent = communication(strategy, np.ones(1000), workers=8, steps=24)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 1,  2,  3,  8, 16, 24])

    Source: Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD",
    ICLR 2020 (2018), section 3.

    Family: Averages of models.
    """
    dense_steps = checks.whole("post_local_sgd: dense_steps", dense_steps, least=0)
    # The period is counted from step 0 of training. torch's hook also continues to
    # average gradients inside a machine after `dense_steps`.
    return chain(
        until(sync_sgd(axis=axis), dense_steps),
        after(model_averaging(period, axis=axis), dense_steps),
    )
