"""0/1 Adam: local steps of Adam, a rarely refreshed variance, sums sent as signs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos._anchors import restart, shipped
from syncalgos._combinators.schedule import sync_every
from syncalgos._dtypes import if_finite, narrow, widen, zeros
from syncalgos.algorithms._one_bit import (
    OneBitAdamState,
    check_adam,
    in_signs,
    init_state,
)
from syncalgos.strategy import WORKERS, Axis, PyTree, Replica, Strategy, factory


class ZeroOneAdamState(NamedTuple):
    """Adam's state, the anchor x, and the round's sums: u of γ m, and that of γ."""

    adam: OneBitAdamState
    anchor: PyTree
    sum: PyTree
    rates: jax.Array


@factory
def zero_one_adam(
    variance_steps: int = 100,
    refreshes: int = 16,
    period: int = 16,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    learning_rate: checks.LearningRate,
    axis: Axis = WORKERS,
) -> Strategy:
    """0/1 Adam: local steps of Adam, whose summed momenta are averaged as signs.

    At every local step, for worker i's gradients g and params θ that began the round at
    x, with C and `clip` as in `one_bit_adam`; m, v, u, s, e and ē are 0 at first:

        m ← β₁ m + (1 - β₁) g;   at a refresh: v ← β₂ v + (1 - β₂) mean(g)²
        u ← u + γ m;   s ← s + γ;   g ← clip(m / (√v + ε))
        at the end of a round: y ← u + e;   d ← C(y);   e ← y - d
            y ← mean(d) + ē;   ū ← C(y);   ē ← y - ū
            m ← ū / s;   x, θ ← x - s clip(m / (√v + ε));   u, s ← 0

    Before local step `variance_steps`, a round is one step, and v is refreshed κ times
    at every step, then κ times at every second step, κ at every fourth, and so on.
    Later, a round is `period` steps, and v stays.

    Args:
        variance_steps: the first local step with v frozen and rounds, at least 1.
        refreshes: κ, refreshes of v until their interval, at first 1, doubles; min. 1.
        period: local steps between two syncs once v is frozen, at least 1.
        b1: β₁, the decay of the momentum, at least 0 and below 1.
        b2: β₂, the decay of the variance, at least 0 and below 1.
        eps: ε, added to the variance's root, above 0.
        learning_rate: γ, the inner optimizer's at each local step: a number above 0
            or a schedule.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: that of `one_bit_adam`, and x, u and s. A sync sends a bit
        per entry twice, and a scale per leaf part; a refresh sends gradients. The
        center is x.

    Raises:
        ValueError: a parameter outside its range.

    The inner optimizer is plain SGD at γ: any other would move the replicas, but not x,
    so the engine refuses it. A gradient that is not finite counts as 0. See
    `one_bit_adam` for entries that are used late. In the paper the period doubles up to
    16.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, zero_one_adam
        >>> model = np.ones(8000, np.float32)
        >>> strategy = zero_one_adam(variance_steps=1, period=2, learning_rate=0.1)
        >>> sent = communication(strategy, model, workers=2, steps=3)
        >>> np.diff(sent.per_step, prepend=0)
        array([33008.,     0.,  1008.])

    Source: Lu et al., "Maximizing communication efficiency for large-scale training via
    0/1 Adam", ICLR 2023 (2022), algorithm 1, with m and v after g as in DeepSpeed.

    Family: Compressed gradients.
    """
    where = "zero_one_adam"
    variance_steps = checks.whole(f"{where}: variance_steps", variance_steps, least=1)
    refreshes = checks.whole(f"{where}: refreshes", refreshes, least=1)
    period = checks.whole(f"{where}: period", period, least=1)
    adam = check_adam(where, b1, b2, eps)
    rate = checks.learning_rate(where, learning_rate)

    def init(params: PyTree) -> ZeroOneAdamState:
        adam_state = init_state(params, axis)
        return ZeroOneAdamState(adam_state, widen(params), zeros(params), jnp.zeros(()))

    def reduce(
        grads: PyTree, replica: Replica, state: ZeroOneAdamState, step: Any
    ) -> tuple[PyTree, ZeroOneAdamState]:
        g = widen(grads)
        m, v, *errors = state.adam
        g = if_finite(g, g, zeros(g))
        # The largest power of two up to step / refreshes + 1.
        interval = 1 << (31 - jax.lax.clz(step // refreshes + jnp.int32(1)))
        is_due = (step < variance_steps) & ((step + refreshes) % interval == 0)
        m = adam.step_first_moment(m, g)
        v = jax.lax.cond(
            is_due,
            lambda: adam.step_second_moment(v, collectives.mean(g, axis)),
            lambda: v,
        )
        total = jax.tree.map(lambda u, m: u + rate(step) * m, state.sum, m)
        rates = state.rates + rate(step)
        adam_state = OneBitAdamState(m, v, *errors)
        new_state = ZeroOneAdamState(adam_state, state.anchor, total, rates)
        return narrow(adam.steps(m, v), grads), narrow(new_state, state)

    def sync(
        replica: Replica, state: ZeroOneAdamState, step: Any
    ) -> tuple[Replica, ZeroOneAdamState]:
        adam_state = in_signs(state.sum, state.rates, adam.b1, state.adam, axis)
        steps = adam.steps(adam_state.first, adam_state.second)
        moves = jax.tree.map(lambda d: state.rates * d, steps)
        anchor = jax.tree.map(jnp.subtract, state.anchor, moves)
        new_state = ZeroOneAdamState(adam_state, anchor, zeros(anchor), jnp.zeros(()))
        return restart(replica, anchor), narrow(new_state, state)

    def round_length(step: Any) -> jax.Array:
        return jnp.where(step < variance_steps, 1, period)

    strategy = Strategy(
        init,
        reduce,
        sync,
        shipped("anchor"),
        axis=axis,
        unit_steps=True,
        learning_rate=learning_rate,
        own_steps=True,
    )
    return sync_every(strategy, round_length)
