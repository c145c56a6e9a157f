"""Strategies that act only at some steps."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from syncalgos import checks
from syncalgos._combinators import introspection, rules, turning
from syncalgos.collectives import PyTree
from syncalgos.collectives._axes import same_on_all
from syncalgos.steps import Every, Lengths, Span, Steps, as_steps, while_tracing
from syncalgos.strategy import (
    OwnGrads,
    Replica,
    Strategy,
    apply_reduce,
    apply_sync,
    check_strategy,
    factory,
    keep_grads,
    keep_replica,
    require_same,
)


@factory
def when(strategy: Strategy, active: Callable[[Any], Any]) -> Strategy:
    """Applies a strategy only at steps where `active(step)` is true.

    Args:
        strategy: the strategy to apply. `delayed`, `paced` and `ema` keep working at
            every step: the condition applies to the strategy inside them.
        active: local step -> whether to act: a scalar boolean, the same on all workers.

    Returns:
        A Strategy. State: the strategy's. It acts at steps where `active` is true and
        the strategy acts; other steps send nothing.

    Raises:
        ValueError: an argument has the wrong type, or the strategy must act at every
            step, like `async_diloco`.

    Example:
        >>> import numpy as np
        >>> from syncalgos import average, communication, when
        >>> strategy = when(average(), lambda step: step == 3)
        >>> sent = communication(strategy, np.ones(10, np.float32), workers=2, steps=6)
        >>> sent.per_step
        array([ 0.,  0.,  0., 40., 40., 40.])
    """
    check_strategy("when", strategy)
    if not callable(active):
        raise ValueError(f"when: active must be a function, got {checks.shown(active)}")
    rules.check_combination("when", strategy)
    return gate(strategy, as_steps(active))


def gate(strategy: Strategy, active: Steps, takes_turns: bool = True) -> Strategy:
    """`when`, without its checks.

    Args:
        strategy: the strategy to apply.
        active: the steps at which to apply it.
        takes_turns: whether a graph that changes takes its turns each time that the
            strategy acts; otherwise by the local step.
    """

    def gate_member(member: Strategy) -> Strategy:
        return gate(member, active, takes_turns)

    if _holds_clock_or_phase(strategy):
        # With the condition around it, a delayed result would wait for the next period,
        # and a phase that begins between its steps would not make its state.
        return introspection.rebuild_members(strategy, gate_member)
    _check_periods_meet(strategy, active)
    if takes_turns:
        take_turns = functools.partial(_take_turns, active)
        strategy = introspection.change_leaf_strategies(take_turns, strategy)
    return _add_gate(strategy, introspection.Gate(active), gate_member)


def _holds_clock_or_phase(strategy: Strategy) -> bool:
    """Whether anything inside works at steps at which its members do not act."""
    return any(
        introspection.combination(part).works_at_each_step
        or introspection.is_phase(part)
        for part in introspection.walk_strategies(strategy)
    )


def _add_gate(
    strategy: Strategy, gate: introspection.Gate, rebuild: introspection.Change
) -> Strategy:
    """Calls a strategy only at the steps of a gate."""
    active = gate.steps
    axis = introspection.find_axis(strategy)

    def reduce(
        grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        step = same_on_all(step, axis)
        return lax.cond(
            active(step),
            lambda: apply_reduce(strategy, grads, replica, state, step),
            lambda: (grads, state),
        )

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
        step = same_on_all(step, axis)
        return lax.cond(
            active(step),
            lambda: apply_sync(strategy, replica, state, step),
            lambda: (replica, state),
        )

    acting_steps = active & introspection.acting_steps(strategy)
    late_steps = introspection.rounds_late(strategy) * acting_steps.min_gap
    # A sync that keeps everything needs no branch.
    gated_sync = sync if introspection.ever_acts(strategy) else keep_replica
    return strategy._replace(
        reduce=introspection.reduce_like(reduce, strategy),
        sync=introspection.Combination(gated_sync, (strategy,), rebuild, gate=gate),
        acts=acting_steps,
        late=late_steps or strategy.late,
    )


def _take_turns(active: Steps, strategy: Strategy) -> Strategy:
    """Lets a leaf strategy take its turns each time that it acts under a condition."""
    # By the local step, a period of 2 would use every other link of a graph, and the
    # workers would never agree.
    turns = introspection.combination(strategy).turns
    if turns is None:
        return strategy
    if not active.period:
        raise rules.make_error("when", "irregular turns")
    counted_turns = turning.CountedTurns(active.period)
    if turns == counted_turns:
        return strategy  # a combinator puts its period around each member
    turned_strategy = turns(lambda step: step // active.period)
    sync = introspection.Combination(turned_strategy.sync, turns=counted_turns)
    return turned_strategy._replace(sync=sync)


def _check_periods_meet(strategy: Strategy, active: Steps) -> None:
    """Refuses a period around one inside, if no local step belongs to both."""
    for structure in introspection.combinations(strategy):
        gate = structure.gate
        if gate and active.period and not active.meets(gate.steps):
            own_period = max(x.period or 1 for x in gate.steps.members)
            raise rules.make_error(
                "every", "unmet period", own_period=own_period, period=active.period
            )


@factory
def every(
    strategy: Strategy, period: int | Callable[[Any], Any], *, offset: int = 0
) -> Strategy:
    """Applies a strategy after local steps period, 2 · period, …

    Args:
        strategy: the strategy to apply.
        period: local steps between syncs, at least 1, counted from the start of
            training. Or a schedule made of jax operations, local step -> length: it is
            called at the first step of each round for the round's length, which is
            rounded down and is at least 1.
        offset: local steps, at least 0 and below the period. The strategy then acts
            after local steps offset, offset + period, …

    Returns:
        A Strategy; see `when`. With a period of 1, the strategy itself.

    Raises:
        ValueError: the period is not a whole number of at least 1, the offset is not
            below it, or the strategy must act at every step.

    Example:
        >>> import numpy as np
        >>> from syncalgos import average, communication, every
        >>> strategy = every(average(), 4)
        >>> sent = communication(strategy, np.ones(10, np.float32), workers=2, steps=12)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 4,  8, 12])
    """
    check_strategy("every", strategy)
    if callable(period):
        if offset:
            raise ValueError(f"every: offset must be 0 with a schedule, got {offset}")
        return when(strategy, Lengths(period))
    period = checks.whole("period", period, least=1)
    offset = checks.whole("every: offset", offset, least=0)
    if offset >= period:
        raise ValueError(
            f"every: offset must be below the period of {period}, got {offset}"
        )
    return strategy if period == 1 else when(strategy, Every(period, offset))


def sync_every(strategy: Strategy, period: int | Callable[[Any], Any]) -> Strategy:
    """`every` for the sync only: reduce acts at all steps."""
    return _sync_gated(strategy, every(strategy._replace(reduce=keep_grads), period))


def sync_when(strategy: Strategy, active: Callable[[Any], Any]) -> Strategy:
    """`when` for the sync only: reduce acts at all steps."""
    return _sync_gated(strategy, when(strategy._replace(reduce=keep_grads), active))


def _sync_gated(strategy: Strategy, gated_strategy: Strategy) -> Strategy:
    """Makes a leaf strategy: members would lack reduce, which shares their state."""
    landing = introspection.landing_steps(gated_strategy)
    sync = introspection.Combination(gated_strategy.sync, landing=landing)
    return strategy._replace(sync=sync, acts=gated_strategy.acts)


@factory
def until(strategy: Strategy, steps: int) -> Strategy:
    """Applies a strategy at steps 0 … `steps` - 1.

    If the strategy has its own center, its state is `init` of the current params once
    the phase is over, as it is in `after` before the start, so that the center does not
    become stale while other strategies train. If replicas differ, so do the workers'
    centers; `DataParallel` averages them. Gradients that `delayed` has under way at the
    end are dropped.

    Args:
        strategy: the strategy to apply.
        steps: the number of local steps, at least 0.

    Returns:
        A Strategy. State: the strategy's.

    Raises:
        ValueError: the argument is not a Strategy, steps is not a whole number of at
            least 0, or `delayed` params would arrive after these steps.

    Example:
        >>> import numpy as np
        >>> from syncalgos import after, bmuf, chain, communication, sync_sgd, until
        >>> strategy = chain(until(sync_sgd(), 3), after(bmuf(4), 3))
        >>> sent = communication(strategy, np.ones(10, np.float32), workers=2, steps=8)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([1, 2, 3, 4, 8])
    """
    check_strategy("until", strategy)
    steps = checks.whole("until: steps", steps, least=0)
    _check_arrivals(strategy, steps)
    return _phase(Span(0, steps), strategy, lambda x: until(x, steps))


@factory
def after(strategy: Strategy, steps: int) -> Strategy:
    """Applies a strategy at steps `steps`, `steps` + 1, …, with new anchors.

    At the first of them, `init` makes a new state from the current params. If the
    strategy has its own center, its state also follows the params before that step, so
    that the center is the current model. The replicas should agree at the start, as
    they do right after a sync; otherwise each worker's anchor starts from its own
    replica. Put `every` inside: `after(every(…, period), steps)`.

    Args:
        strategy: the strategy to apply.
        steps: the number of local steps before it starts, at least 0.

    Returns:
        A Strategy. State: the strategy's.

    Raises:
        ValueError: the argument is not a Strategy, or steps is not a whole number of at
            least 0.

    Example:
        >>> import numpy as np
        >>> from syncalgos import after, communication, diloco
        >>> strategy = after(diloco(4), 6)
        >>> sent = communication(strategy, np.ones(10, np.float32), workers=2, steps=16)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 8, 12, 16])
    """
    check_strategy("after", strategy)
    steps = checks.whole("after: steps", steps, least=0)
    phase = _phase(Span(steps), strategy, lambda x: after(x, steps))

    def reduce(
        grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        # An anchor from step 0 would be stale: BMUF after 20 synchronous steps would
        # start with twenty times its velocity. The state is made here, not in the sync
        # before: a member chained after this one may have moved the params since.
        state = lax.cond(
            step == steps,
            lambda: _make_fresh_state(strategy, replica, state),
            lambda: state,
        )
        return phase.reduce(grads, replica, state, step)

    keeps_gradients = not introspection.reduces(strategy)
    return phase._replace(reduce=OwnGrads(reduce) if keeps_gradients else reduce)


def _make_fresh_state(strategy: Strategy, replica: Replica, state: PyTree) -> PyTree:
    """The strategy's first state for the current params; it must fit the old state."""
    return require_same("init", "state", state, strategy.init(replica.params))


def _phase(
    active: Steps, strategy: Strategy, rebuild: introspection.Change
) -> Strategy:
    """Applies a strategy in a phase; outside, its center is the current params."""
    # Also around combinators that work at every step: outside of its phase a worker
    # that is paced must not be held, and nothing that is delayed may arrive.
    phase_gate = introspection.Gate(active, is_phase=True)
    gated_strategy = _add_gate(strategy, phase_gate, rebuild)
    if not introspection.has_center(strategy):
        return gated_strategy

    def sync_or_follow(
        replica: Replica, state: PyTree, step: Any
    ) -> tuple[Replica, PyTree]:
        return lax.cond(
            active(step),
            lambda: apply_sync(strategy, replica, state, step),
            # Makes the state anew at each such step, so that the center of an inactive
            # phase is the current model, and `chain` need not know of phases.
            lambda: (replica, _make_fresh_state(strategy, replica, state)),
        )

    # Following the params is an action, so it also acts outside the phase.
    acts = introspection.acting_steps(strategy) | ~active
    sync = replace(introspection.combination(gated_strategy), call=sync_or_follow)
    return gated_strategy._replace(sync=sync, acts=acts)


def _check_arrivals(strategy: Strategy, end: int) -> None:
    """Refuses a phase that ends while params are under way."""
    for structure in introspection.combinations(strategy):
        if structure.delay is None or structure.landing is None:
            continue
        delay = structure.delay.steps
        with while_tracing():
            is_late = structure.landing.next(end) < end + delay
        if not checks.is_traced(is_late) and is_late:
            raise rules.make_error("until", "on the way", delay=delay, end=end)


@factory
def at_end(strategy: Strategy, steps: int) -> Strategy:
    """Adds a sync after the last local step of a run.

    A run of 240 local steps with a period of 64 has its last sync after step 192, so
    the center lacks 48 steps. With `at_end`, the strategy also syncs after step 240, in
    the middle of a round. This sync sends as much as any other, and is counted.

    Args:
        strategy: a strategy that syncs by `every`, which may be inside other
            combinators.
        steps: the number of local steps of the run, at least 1.

    Returns:
        A Strategy. State: the strategy's. A strategy that never syncs, or syncs at that
        step anyway, does not change.

    Raises:
        ValueError: the number of steps is below 1, or the strategy cannot sync at steps
            other than its own: it is delayed, its workers do not wait for each other,
            the data decide, or its rounds have a fixed length, as in scaffold.

    Example:
        >>> import numpy as np
        >>> from syncalgos import at_end, bmuf, communication
        >>> strategy = at_end(bmuf(4), 10)
        >>> sent = communication(strategy, np.ones(10, np.float32), workers=2, steps=10)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 4,  8, 10])
    """
    check_strategy("at_end", strategy)
    last_step = checks.whole("at_end: steps", steps, least=1) - 1
    rules.check_combination("at_end", strategy)
    if not introspection.ever_syncs(strategy):
        return strategy
    ending_strategy = _add_last_step(strategy, last_step)
    with jax.ensure_compile_time_eval():
        lands = introspection.lands(ending_strategy, last_step)
    if checks.is_traced(lands) or not lands:
        raise rules.make_error("at_end", "fixed rounds", steps=steps)
    return ending_strategy


def _add_last_step(strategy: Strategy, last_step: int) -> Strategy:
    """The same strategy, with the last step added to each period's steps."""
    structure = introspection.combination(strategy)
    if structure.delay is not None:
        raise rules.make_error("at_end", "delayed", delay=structure.delay.steps)
    if not structure.members:
        return strategy

    def add_to_member(member: Strategy) -> Strategy:
        return _add_last_step(member, last_step)

    if structure.gate and isinstance(structure.gate.steps, Every | Lengths):
        # The graph of a member, if it changes, has taken its turns already.
        [member] = structure.members
        steps = structure.gate.steps.with_last(last_step)
        return gate(add_to_member(member), steps, takes_turns=False)
    return introspection.rebuild_members(strategy, add_to_member)
