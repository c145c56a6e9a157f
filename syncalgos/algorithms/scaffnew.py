"""Scaffnew (ProxSkip): corrected local steps, and syncs at random steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos._anchors import restart
from syncalgos._combinators.schedule import sync_when
from syncalgos._dtypes import narrow, widen, zeros
from syncalgos._keys import common_key
from syncalgos.strategy import (
    WORKERS,
    Axis,
    MeanCenter,
    OwnGrads,
    PyTree,
    Replica,
    Strategy,
    factory,
)


class ScaffnewState(NamedTuple):
    """The worker's control h."""

    control: PyTree


@factory
def scaffnew(
    period: int = 16,
    *,
    learning_rate: checks.LearningRate,
    seed: int = 0,
    axis: Axis = WORKERS,
) -> Strategy:
    """Scaffnew (ProxSkip): control variates, and averages at random steps.

    At every local step, for worker i's gradients g and control h, zero at first; and
    after steps drawn with probability p = 1 / `period`, identical on all workers, for
    params θ and the step's learning rate γ:

        g ← g - h
        x ← mean(θ - (γ / p) h);   h ← h + (p / γ) (x - θ);   θ ← x

    Args:
        period: local steps between two syncs on average, at least 1.
        learning_rate: γ, the inner optimizer's at each local step: a number above 0
            or a schedule.
        seed: seeds the draws of the steps, identical on all workers.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: h, shaped like params, at least float32, each worker's own. A
        sync sends θ - (γ / p) h once. The center is the mean of the replicas. opt_state
        and buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    With plain SGD as the inner optimizer, as in the paper, workers with different data
    converge to the minimum of their mean loss, for half of what `scaffold` sends.
    Momentum in the inner optimizer makes a step longer than γ times a gradient, and
    training may diverge.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, scaffnew
        >>> strategy = scaffnew(4, learning_rate=0.1)
        >>> sent = communication(strategy, np.ones(10), workers=2, steps=400)
        >>> 80 < sent.syncs < 120  # at random steps, of which every fourth is expected
        True

    Source: Mishchenko et al., "ProxSkip: yes! local gradient steps provably lead to
    communication acceleration! finally!", ICML 2022, algorithm 2.

    Family: Against drift.
    """
    chance = 1 / checks.whole("period", period, least=1)
    rate = checks.learning_rate("scaffnew", learning_rate)
    seed = checks.seed(seed)

    def syncs(step: Any) -> jax.Array:
        # float32 explicitly: with x64 the default would draw another number.
        return jax.random.uniform(common_key(seed, step), (), jnp.float32) < chance

    def init(params: PyTree) -> ScaffnewState:
        return ScaffnewState(zeros(params))

    def reduce(
        grads: PyTree, replica: Replica, state: ScaffnewState, step: Any
    ) -> tuple[PyTree, ScaffnewState]:
        corrected = jax.tree.map(jnp.subtract, widen(grads), state.control)
        return narrow(corrected, grads), state

    def sync(
        replica: Replica, state: ScaffnewState, step: Any
    ) -> tuple[Replica, ScaffnewState]:
        unit = rate(step) / chance
        params = widen(replica.params)
        # The mean of h is 0; sending h too keeps it 0 despite rounding.
        shifted = jax.tree.map(lambda x, h: x - unit * h, params, state.control)
        mean = collectives.mean(narrow(shifted, params), axis)
        # At the end of a schedule γ may be 0: then h stays.
        divisor = jnp.where(unit > 0, unit, jnp.inf)
        control = jax.tree.map(
            lambda h, y, x: h + (y - x) / divisor, state.control, mean, params
        )
        return restart(replica, mean), ScaffnewState(narrow(control, state.control))

    strategy = Strategy(
        init, OwnGrads(reduce), sync, MeanCenter(axis), learning_rate=learning_rate
    )
    return sync_when(strategy, syncs)
