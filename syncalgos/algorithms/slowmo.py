"""SlowMo: slow momentum on the average of the models."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos._anchors import restart, shipped
from syncalgos._combinators.schedule import every
from syncalgos._dtypes import narrow, widen, zeros
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import WORKERS, Axis, PyTree, Replica, Strategy, factory


class SlowMoState(NamedTuple):
    """The anchor x and the slow momentum u."""

    anchor: PyTree
    velocity: PyTree


@factory
def slowmo(
    period: int = 16,
    slow_momentum: float = 0.5,
    slow_lr: float = 1.0,
    learning_rate: checks.LearningRate = checks.REQUIRED,
    *,
    axis: Axis = WORKERS,
) -> Strategy:
    """SlowMo: momentum on the average of the models, in units of the learning rate.

    After every `period` local steps, for workers' params θ that started from x, γ the
    learning rate of the last of these steps, and u, 0 at first:

        u ← β u + (x - mean(θ)) / γ;   x, θ ← x - α γ u

    Args:
        period: local steps between two slow steps, at least 1; 12 to 48 in the paper.
        slow_momentum: β, at least 0 and below 1; 0.4 to 0.8 in the paper.
        slow_lr: α, above 0.
        learning_rate: γ, the inner optimizer's at each local step: a number above 0
            or a schedule.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x and u, shaped like params, at least float32, identical on
        all workers. A sync sends params once. The center is x. opt_state and buffers
        stay local (see `reset`, `average`).

    Raises:
        ValueError: a parameter outside its range.

    A steady drift moves the center α / (1 - β) times as far as plain averaging. Unlike
    BMUF's velocity, u does not depend on old learning rates. At γ = 0 the models are
    averaged, and u decays.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import Replica, at_syncs, communication, reset, slowmo
        >>> params, optimizer = jnp.ones(1000), optax.sgd(0.1, momentum=0.9)
        >>> replica = Replica(params, optimizer.init(params))
        >>> strategy = slowmo(16, learning_rate=0.1)
        >>> both = at_syncs(strategy, reset(optimizer))
        >>> communication(both, replica, workers=8, steps=16).bytes_per_worker
        7000.0

    Source: Wang, Tantia, Ballas and Rabbat, "SlowMo: improving communication-efficient
    distributed SGD with slow momentum", ICLR 2020 (2019), algorithm 1.

    Family: Outer momentum.
    """
    momentum = checks.real("slowmo: slow_momentum", slow_momentum, least=0, below=1)
    slow_lr = checks.real("slowmo: slow_lr", slow_lr, above=0)
    rate = checks.learning_rate("slowmo", learning_rate)

    def init(params: PyTree) -> SlowMoState:
        return SlowMoState(widen(params), zeros(params))

    def sync(
        replica: Replica, state: SlowMoState, step: Any
    ) -> tuple[Replica, SlowMoState]:
        gamma = rate(step)
        # A schedule may end at 0: there is no unit then to measure moves in.
        has_unit = gamma > 0
        unit = jnp.where(has_unit, gamma, 1)

        def slow_step(
            x: jax.Array, u: jax.Array, start: jax.Array, mean: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            u = momentum * u + jnp.where(has_unit, (start - mean) / unit, 0)
            x = jnp.where(has_unit, x - slow_lr * (gamma * u), x + (mean - start))
            return x, u

        start = narrow(state.anchor, replica.params)
        mean = collectives.mean(widen(replica.params), axis)
        new_state = SlowMoState(*over_leaves(slow_step, 2, *state, start, mean))
        # The learning rate may be of a wider dtype.
        new_state = narrow(new_state, state)
        return restart(replica, new_state.anchor), new_state

    strategy = Strategy(
        init,
        sync=sync,
        center=shipped("anchor"),
        axis=axis,
        learning_rate=learning_rate,
    )
    return every(strategy, period)
