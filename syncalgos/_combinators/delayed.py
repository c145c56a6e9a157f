"""Delayed communication: results arrive some local steps after they were sent."""

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncalgos import checks
from syncalgos._combinators import introspection, participation, rules
from syncalgos._combinators.schedule import when
from syncalgos._dtypes import narrow, select, widen
from syncalgos.collectives import PyTree
from syncalgos.steps import NEVER, Steps
from syncalgos.strategy import (
    Replica,
    Strategy,
    apply_sync,
    changes_params,
    check_strategy,
    factory,
    keep_replica,
)

CHECKED_STEPS = 2**14
"""Local steps in which to look for results that arrive after the next was sent."""


class DelayedState(NamedTuple):
    """State of `delayed`.

    Attributes:
        strategy: the strategy's state after the last step at which it sent.
        center: the strategy's own center at the last arrival; () if it has none.
        grads: reduced gradients on the way, (delay, *S) for each leaf of shape S.
        syncs: params (or their changes) and centers on the way, (slots, *S) each.
        sent_at: the local step at which each slot was sent, (slots,); -1 for none.
    """

    strategy: PyTree
    center: PyTree
    grads: PyTree
    syncs: PyTree
    sent_at: PyTree


Arrival = Literal["replace", "add"]


@factory
def delayed(
    strategy: Strategy, delay: int, *, alpha: float = 0.0, arrival: Arrival = "replace"
) -> Strategy:
    """Delays what a strategy sends: sent at local step t, it arrives at t + delay.

    A sync turns the replica's params at step t, θₜ, into the params that arrive. They
    take effect after step t + delay, when the replica's own params are θ:

        replace: θ ← (1 - α) · arrived + α · θ
        add:     θ ← θ + (1 - α) · (arrived - θₜ)

    Replacing discards a share 1 - α of the local steps since t. Adding keeps them, as
    methods that overlap a whole round do. For a strategy that reduces gradients, those
    reduced at step t are used at t + delay; before the first arrival, gradients are
    zero. A delay of 0 returns the strategy itself, apart from the mixing by α.

    Args:
        strategy: the strategy to delay. In a `chain`, each member is delayed on its
            own.
        delay: local steps from sending to arrival, at least 0.
        alpha: α, the weight of the local value when a result arrives, at least 0 and at
            most 1.
        arrival: replace or add. With replace, a result must arrive before the next is
            sent; otherwise no local step is ever kept.

    Returns:
        A Strategy. State: the strategy's, and the results on the way: one copy of
        params for each sync that overlaps, and `delay` copies of reduced gradients.
        Changes to opt_state and buffers take effect at once. The center is that of the
        last arrival. `communication` counts bytes at the step that sends them.

    Raises:
        ValueError: the strategy is not a Strategy, is `decided`, or must act at every
            step, like `async_diloco`; or a parameter is outside its range. When the
            state is made: results would arrive after the next were sent.

    The delay simulates the results of an overlap; collectives do not really run during
    computation. A result that takes longer than a round is not yet part of the next one
    sent, which then corrects the same difference again. With m results on the way,
    averaged replicas stay together if 1 - α is below 2 sin(π / (4 m + 2)): 1 for one
    result, 0.62 for two.

    Example:
        >>> import numpy as np
        >>> from syncalgos import bmuf, communication, delayed
        >>> strategy = delayed(bmuf(8), 3)
        >>> strategy.late
        3
        >>> sent = communication(strategy, np.ones(10, np.float32), workers=2, steps=16)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1  # steps that send
        array([ 8, 16])

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
    algorithm 2.
    """
    check_strategy("delayed", strategy)
    rules.check_combination("delayed", strategy)
    delay = checks.whole("delayed: delay", delay, least=0)
    alpha = checks.real("delayed: alpha", alpha, least=0)
    if not checks.is_traced(alpha) and alpha > 1:
        raise ValueError(f"delayed: alpha must be at most 1, got {alpha}")
    checks.one_of("arrival of delayed", arrival, get_args(Arrival))
    if delay == 0:
        keeps_local_steps = checks.is_traced(alpha) or alpha != 0
        if not keeps_local_steps:
            return strategy
        mix_leaf = functools.partial(_mix_local_params, alpha)
        return introspection.change_leaf_strategies(mix_leaf, strategy)
    gates, member = introspection.unwrap_gates(strategy)
    structure = introspection.combination(member)
    if structure.delay is not None:
        raise rules.make_error("delayed", "delayed")
    if structure.mixes or not structure.members:
        return _delay_sender(strategy, member, delay, alpha, arrival)

    def delay_member(member: Strategy) -> Strategy:
        for active in reversed(gates):
            member = when(member, active)
        return delayed(member, delay, alpha=alpha, arrival=arrival)

    return introspection.rebuild_members(member, delay_member)


def _mix_local_params(alpha: float, strategy: Strategy) -> Strategy:
    """A strategy without a delay that keeps a share α of the local params."""
    if not introspection.ever_syncs(strategy):
        return strategy

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
        new_replica, new_state = apply_sync(strategy, replica, state, step)
        change_flags = changes_params(strategy, replica, state, step)
        params = _mix_params(alpha, change_flags, new_replica.params, replica.params)
        return new_replica._replace(params=params), new_state

    # A combinator around the strategy, inside which its workers are weighted: the share
    # of local params that a worker keeps must not be multiplied by its weight.
    mixed = introspection.Combination(
        sync,
        (strategy,),
        lambda member: delayed(member, 0, alpha=alpha),
        mixes=True,
    )
    return strategy._replace(sync=mixed)


def _mix_params(
    alpha: float, change_flags: list[bool], arrived: PyTree, local: PyTree
) -> PyTree:
    """(1 - α) · arrived + α · local, on the leaves that a sync changes."""

    def mix(arrived_leaf: jax.Array, local_leaf: jax.Array) -> jax.Array:
        # 0 times NaN would be NaN.
        if not checks.is_traced(alpha) and alpha in (0, 1):
            return (local_leaf if alpha else arrived_leaf).astype(local_leaf.dtype)
        x = widen(arrived_leaf)
        y = widen(local_leaf)
        if checks.is_traced(alpha):
            y = jnp.where((alpha == 0) & ~jnp.isfinite(y), x, y)
            x = jnp.where((alpha == 1) & ~jnp.isfinite(x), y, x)
        return ((1 - alpha) * x + alpha * y).astype(local_leaf.dtype)

    local_leaves, structure = jax.tree.flatten(local)
    triples = zip(change_flags, jax.tree.leaves(arrived), local_leaves, strict=True)
    mixed_leaves = []
    for is_changed, arrived_leaf, local_leaf in triples:
        mixed_leaves.append(mix(arrived_leaf, local_leaf) if is_changed else local_leaf)
    return structure.unflatten(mixed_leaves)


def _check_gaps(sending_steps: Steps, delay: int) -> None:
    """Refuses results that would arrive after the next was sent."""
    if delay < sending_steps.min_gap:
        return
    if sending_steps.period is not None:  # the gap between any two syncs
        raise rules.make_error("delayed", "frequent", delay=delay)
    # The steps are looked up, as a schedule or a condition does not tell how far apart
    # they are. If each result replaced all local steps, training would stand still.
    with jax.ensure_compile_time_eval():
        checked_steps = jnp.arange(CHECKED_STEPS, dtype=jnp.int32)
        is_sending = jax.vmap(lambda step: jnp.asarray(sending_steps(step)))(
            checked_steps
        )
    if checks.is_traced(is_sending):  # depends on a number that only the program knows
        return
    gaps = np.diff(np.flatnonzero(np.asarray(is_sending)))
    if gaps.size and delay >= gaps.min():
        raise rules.make_error("delayed", "frequent", delay=delay)


def _delay_sender(
    strategy: Strategy,
    sender: Strategy,
    delay: int,
    alpha: float,
    arrival: Arrival,
) -> Strategy:
    """`delayed`, for a strategy that combinators must not take apart.

    Args:
        strategy: the strategy to delay, with any `when` around it.
        sender: the strategy inside all of these.
        delay, alpha, arrival: as in `delayed`.
    """
    has_center = introspection.has_center(strategy)
    reduces = introspection.reduces(strategy)
    syncs = introspection.ever_syncs(sender)
    sending_steps = introspection.landing_steps(strategy)
    arrival_steps = sending_steps.shift(delay)
    min_gap = sending_steps.min_gap
    slots = -(-delay // min_gap)
    # Two irregular sends that are more than `min_gap` steps apart may skip a number
    # step // apart, and with it a slot.
    if slots > 1 and min_gap > 1 and not sending_steps.period:
        slots += 1

    def make_result(
        params: PyTree, sent_params: PyTree, state: PyTree
    ) -> tuple[PyTree, PyTree]:
        center = strategy.center(params, state) if has_center else ()
        if arrival == "add":
            params = jax.tree.map(jnp.subtract, widen(params), widen(sent_params))
        return params, center

    def init(params: PyTree) -> DelayedState:
        if syncs and arrival == "replace":
            _check_gaps(sending_steps, delay)
        state = strategy.init(params)
        result = make_result(params, params, state)
        _, center = result
        return DelayedState(
            strategy=state,
            center=center,
            grads=_make_zero_rows(params, delay) if reduces else (),
            syncs=_make_zero_rows(result, slots) if syncs else (),
            sent_at=jnp.full(slots, -1, jnp.int32) if syncs else (),
        )

    def reduce(
        grads: PyTree, replica: Replica, state: DelayedState, step: Any
    ) -> tuple[PyTree, DelayedState]:
        new_grads, new_state = strategy.reduce(grads, replica, state.strategy, step)
        if not reduces:
            return new_grads, state._replace(strategy=new_state)
        slot = step % delay
        arrived_grads = jax.tree.map(lambda row: row[slot], state.grads)
        rows = _put_row(state.grads, slot, new_grads)  # (delay, …)
        return arrived_grads, state._replace(strategy=new_state, grads=rows)

    def receive(
        replica: Replica, state: DelayedState, step: Any
    ) -> tuple[Replica, DelayedState]:
        slot = (step - delay) // min_gap % len(state.sent_at)
        result, center = jax.tree.map(lambda row: row[slot], state.syncs)
        local = replica.params
        if arrival == "add":
            params = jax.tree.map(
                lambda x, d: x + (1 - alpha) * d, widen(local), result
            )
            params = narrow(params, local)
        else:
            # Leaves that the strategy does not change keep their local steps.
            change_flags = changes_params(sender, replica, state.strategy, step)
            params = _mix_params(alpha, change_flags, result, local)
        # Nothing was sent if the phase around this strategy began later, or if nobody
        # took part.
        was_sent = state.sent_at[slot] == step - delay
        is_reached = was_sent & participation.receives(sender, step - delay)
        params = select(is_reached, params, local)
        center = select(was_sent, center, state.center)
        return replica._replace(params=params), state._replace(center=center)

    def send(
        replica: Replica, state: DelayedState, step: Any
    ) -> tuple[Replica, DelayedState]:
        new_replica, sender_state = apply_sync(sender, replica, state.strategy, step)
        result = make_result(new_replica.params, replica.params, sender_state)
        slot = step // min_gap % len(state.sent_at)
        is_sent = participation.any_worker_participates(sender, step)
        sent_step = jnp.where(is_sent, step, -1)
        new_state = state._replace(
            strategy=sender_state,
            syncs=_put_row(state.syncs, slot, result),
            sent_at=_put_row(state.sent_at, slot, jnp.int32(sent_step)),
        )
        return new_replica._replace(params=replica.params), new_state

    def sync(
        replica: Replica, state: DelayedState, step: Any
    ) -> tuple[Replica, DelayedState]:
        # In this order, so that a sync sees the params after the arrival.
        arrived = when(Strategy(sync=receive), arrival_steps).sync(replica, state, step)
        return when(Strategy(sync=send), sending_steps).sync(*arrived, step)

    acts = introspection.acting_steps(strategy) | arrival_steps
    keeps_local_steps = checks.is_traced(alpha) or alpha != 0
    replaces = arrival == "replace" and not keeps_local_steps
    return strategy._replace(
        init=init,
        reduce=introspection.reduce_like(reduce, strategy),
        sync=introspection.Combination(
            sync if syncs else keep_replica,
            (strategy,),
            lambda member: delayed(member, delay, alpha=alpha, arrival=arrival),
            delay=introspection.Delay(delay, replaces=replaces),
            landing=arrival_steps if syncs else None,
        ),
        center=(lambda params, state: state.center) if has_center else strategy.center,
        acts=acts if syncs else NEVER,
        late=strategy.late + delay,
    )


def _make_zero_rows(tree: PyTree, count: int) -> PyTree:
    """Zeros for `count` trees: (count, *S) for each leaf of shape S."""
    return jax.tree.map(lambda x: jnp.zeros((count, *jnp.shape(x)), x.dtype), tree)


def _put_row(rows: PyTree, slot: Any, tree: PyTree) -> PyTree:
    """Replaces one row of each leaf."""
    return jax.tree.map(
        lambda row, x: lax.dynamic_update_index_in_dim(row, x, slot, 0), rows, tree
    )
