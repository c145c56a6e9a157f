"""DES-LOC: params and the optimizer's moments are averaged at different periods."""

from typing import Any

from syncalgos import checks, collectives
from syncalgos._combinators.chain import chain
from syncalgos._combinators.introspection import Combination
from syncalgos._combinators.primitives import average
from syncalgos._combinators.schedule import every
from syncalgos._optax_states import map_moments
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    PyTree,
    Replica,
    Strategy,
    factory,
)


@factory
def des_loc(
    period: int = 16,
    first_period: int | None = None,
    second_period: int | None = None,
    *,
    axis: Axis = WORKERS,
) -> Strategy:
    """DES-LOC: local SGD that averages the optimizer's moments too, less often.

    For workers' params θ, first moments m and second moments v:

        after every `period` local steps: θ ← mean(θ)
        after every `first_period` local steps: m ← mean(m)
        after every `second_period` local steps: v ← mean(v)

    Args:
        period: local steps between two averages of params, at least 1.
        first_period: local steps between two averages of the first moments, at least 1;
            None means 3 periods.
        second_period: local steps between two averages of the second moments, at least
            1; None means 6 periods.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. No state. A sync sends whichever of params and moments are due,
        once each. Moments that the inner optimizer lacks are skipped.

    Raises:
        ValueError: a period that is not a whole number of at least 1; during tracing,
            an optimizer whose state holds no known moments.

    The paper averages before a local step; this code averages after the previous step.

    Example:
        >>> import numpy as np
        >>> import optax
        >>> from syncalgos import Replica, communication, des_loc
        >>> params = np.ones(1000, np.float32)
        >>> replica = Replica(params, optax.adam(0.1).init(params))
        >>> sent = communication(des_loc(2), replica, workers=8, steps=12)
        >>> np.diff(sent.per_step, prepend=0)[1::2]
        array([ 7000.,  7000., 14000.,  7000.,  7000., 21000.])

    Source: Iacob et al., "DES-LOC: desynced low communication adaptive optimizers",
    2025, algorithm 1; its periods of 1 : 3 : 6.

    Family: Averages of models.
    """
    period = checks.whole("period", period, least=1)
    if first_period is None:
        first_period = 3 * period
    if second_period is None:
        second_period = 6 * period
    first_period = checks.whole("first_period", first_period, least=1)
    second_period = checks.whole("second_period", second_period, least=1)

    def average_moments(order: int) -> Strategy:
        def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
            def mean(moments: PyTree) -> PyTree:
                return collectives.mean(collectives.weighted(moments), axis)

            opt_state = map_moments(order, mean, replica.opt_state)
            return replica._replace(opt_state=opt_state), state

        # The center never changes.
        combination = Combination(sync, arrives=())
        return Strategy(sync=combination, center=MeanCenter(axis))

    return chain(
        every(average(axis=axis), period),
        every(average_moments(1), first_period),
        every(average_moments(2), second_period),
    )
