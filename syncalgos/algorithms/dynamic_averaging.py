"""Dynamic averaging: models are averaged once one has gone too far from the last."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.combinators.decided import decided
from syncalgos.combinators.schedule import every
from syncalgos.dtypes import widen
from syncalgos.strategy import MeanCenter, Strategy


class DynamicState(NamedTuple):
    """The last average r."""

    reference: PyTree


def dynamic_averaging(
    period: int = 16, bound: float = 0.1, axis: Axis = WORKERS
) -> Strategy:
    """Dynamic averaging: only when a model has gone too far since the last average.

    After every `period` local steps, for workers' params θ and the last average r:

        if |θᵢ - r|² > Δ for any worker i:   r, θ ← mean(θ)

    Args:
        period: local steps between two votes, at least 1.
        bound: Δ, the squared distance, a 2-norm over all params, that no worker may
            exceed without an average; above 0.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: r, shaped like params, at least float32, equal on all
        workers. A vote sends one number, an average params once. opt_state and buffers
        stay local. Metrics "decided" of a run say when models were averaged.

    Raises:
        ValueError: a parameter outside its range.

    The mean of the replicas' squared distances to their mean is at most Δ after each
    vote. Δ grows with the size of the model and with the square of the learning rate.

    Source: Kamp, Adilova, Sicking, Hüger, Schlicht, Wirtz and Wrobel, "Efficient
    decentralized deep learning by dynamic model averaging", ECML PKDD 2018: the
    condition that each worker watches; where one breaks it all are averaged, and no
    part of them is tried first.
    """
    bound = checks.real("dynamic_averaging: bound", bound, above=0)

    def vote(replica, state, step):
        moved = jax.tree.map(jnp.subtract, widen(replica.params), state.reference)
        return optax.tree.norm(moved, squared=True) > bound

    def sync(replica, state, step):
        params = collectives.mean(replica.params, axis)
        return replica._replace(params=params), DynamicState(widen(params))

    average = Strategy(
        lambda params: DynamicState(widen(params)), sync=sync, center=MeanCenter(axis)
    )
    return every(period, decided(vote, average, axis))
