"""Dynamic averaging: models are averaged once one is too far from the last average."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks, collectives
from syncalgos._combinators.decided import decided
from syncalgos._combinators.schedule import every
from syncalgos._dtypes import widen
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    PyTree,
    Replica,
    Strategy,
    factory,
)


class DynamicState(NamedTuple):
    """The last average r."""

    reference: PyTree


@factory
def dynamic_averaging(
    period: int = 16, bound: float = 0.1, *, axis: Axis = WORKERS
) -> Strategy:
    """Dynamic averaging: models are averaged once one has moved too far.

    After every `period` local steps, for workers' params θ and the last average r,
    at first the first params:

        if |θᵢ - r|² > Δ for any worker i:   r, θ ← mean(θ)

    Args:
        period: local steps between two votes, at least 1.
        bound: Δ, the squared 2-norm over all params of a worker's move above which the
            models are averaged; above 0.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: r, shaped like params, at least float32, identical on all
        workers. A vote sends one number; an average sends params once. opt_state and
        buffers stay local. The metric "decided" of a run marks the averages.

    Raises:
        ValueError: a parameter outside its range.

    After each vote, the replicas' mean squared distance to their mean is at most Δ. The
    right Δ grows with the size of the model and the square of the learning rate.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, dynamic_averaging
        >>> params, taken = np.ones(1000, np.float32), np.zeros((16, 1), bool)
        >>> for taken[7] in (False, True):
        ...     sent = communication(
        ...         dynamic_averaging(8), params, workers=8, steps=16, taken=taken
        ...     )
        ...     print(sent.bytes_per_worker)
        14.0
        7014.0

    Source: Kamp, Adilova, Sicking, Hüger, Schlicht, Wirtz and Wrobel, "Efficient
    decentralized deep learning by dynamic model averaging", ECML PKDD 2018: its local
    condition. The paper first tries to remove a violation by averaging only some of the
    models.

    Family: Averages of models.
    """
    bound = checks.real("dynamic_averaging: bound", bound, above=0)

    # The paper's workers send nothing unless their condition breaks. Without the
    # paper's coordinator all workers must know: this costs one number a period.
    def vote(replica: Replica, state: DynamicState, step: Any) -> jax.Array:
        moves = jax.tree.map(jnp.subtract, widen(replica.params), state.reference)
        # NaN is not above any bound, but must trigger an average.
        return ~(optax.tree.norm(moves, squared=True) <= bound)

    def sync(
        replica: Replica, state: DynamicState, step: Any
    ) -> tuple[Replica, DynamicState]:
        params = collectives.mean(replica.params, axis)
        return replica._replace(params=params), DynamicState(widen(params))

    average = Strategy(
        lambda params: DynamicState(widen(params)), sync=sync, center=MeanCenter(axis)
    )
    return every(decided(average, vote), period)
