"""Strategies that act only at some steps."""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, use_abstract_mesh

from syncalgos import checks
from syncalgos.collectives import PyTree
from syncalgos.combinators import introspection
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

TABLED = 2**16
"""Local steps whose rounds are in a table; later rounds are found one by one."""

LONGEST = 2**30
"""The length of a round without an end, in local steps."""


AT_EACH_STEP = introspection.Delayed, introspection.Clocked
"""Kinds of combinators that work at every local step."""


@factory
def when(strategy: Strategy, active: introspection.Steps) -> Strategy:
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
    introspection.check_not_steady("when", strategy)
    return _when(strategy, active)


def _when(strategy: Strategy, active: introspection.Steps) -> Strategy:
    """`when`, without its checks."""
    if introspection.kinds(strategy, introspection.Phase, *AT_EACH_STEP):
        # With the condition around it, a delayed result would wait for the next period,
        # and a phase that begins between its steps would not make its state.
        return introspection.rebuilt(strategy, lambda member: _when(member, active))
    if isinstance(active, Period):
        _check_meeting(strategy, active)
    strategy = introspection.innermost(functools.partial(_in_turn, active), strategy)
    gate = introspection.Gated(active)
    return _gated(strategy, gate, lambda member: _when(member, active))


def _gated(
    strategy: Strategy, gate: introspection.Gated, again: introspection.Change
) -> Strategy:
    """Calls a strategy only at the steps of a gate."""
    active = gate.steps

    def reduce(grads, replica, state, step):
        return lax.cond(
            active(step),
            lambda: apply_reduce(strategy, grads, replica, state, step),
            lambda: (grads, state),
        )

    def sync(replica, state, step):
        return lax.cond(
            active(step),
            lambda: apply_sync(strategy, replica, state, step),
            lambda: (replica, state),
        )

    # A sync that keeps everything needs no branch.
    gated = sync if introspection.ever_acts(strategy) else keep_replica
    return strategy._replace(
        reduce=introspection.reduce_like(reduce, strategy),
        sync=introspection.Combination(gated, (strategy,), again, gate),
        acts=introspection.at_both(active, introspection.acting_steps(strategy)),
    )


def _in_turn(active: introspection.Steps, strategy: Strategy) -> Strategy:
    """Lets a whole take its turns each time that it acts under a condition."""
    # By the local step, a period of 2 would use every other link of a graph, and the
    # workers would never agree.
    kind = introspection.kind_of(strategy)
    followed = not isinstance(active, WithLast | Between)
    if not (isinstance(kind, introspection.Turning) and followed):
        return strategy
    if isinstance(active, Period):
        counted = introspection.Counted(active.period)
        if kind.turns == counted:
            return strategy  # a combinator puts its period around each member
        turned = kind.turns(lambda step: step // active.period)
        kind = introspection.Turning(counted)
        return turned._replace(sync=introspection.Combination(turned.sync, kind=kind))
    introspection.check_no_turns("when", strategy)
    return strategy


def _check_meeting(strategy: Strategy, active: "Period") -> None:
    """Refuses a period around one inside, if no local step belongs to both."""
    for gate in introspection.kinds(strategy, introspection.Gated):
        inner = gate.steps
        if isinstance(inner, WithLast) and not active(inner.last):
            inner = inner.steps
        if isinstance(inner, Period) and (active.offset - inner.offset) % math.gcd(
            active.period, inner.period
        ):
            raise ValueError(
                f"every: a part of this strategy acts every {inner.period} steps, but "
                f"never at the end of a period of {active.period}: set the "
                "strategy's own period instead"
            )


class Period(NamedTuple):
    """A function: step -> whether it is offset, offset + period, …, counted from 1.

    Attributes:
        period: local steps between syncs, at least 1.
        offset: local steps, at least 0 and below the period.
    """

    period: int
    offset: int

    def __call__(self, step: Any) -> Any:
        return (step + 1 - self.offset) % self.period == 0


class Between(NamedTuple):
    """A function: step -> whether it is not in `steps`, at which something else acts.

    What acts between takes its turns by the local step.
    """

    steps: introspection.Steps

    def __call__(self, step: Any) -> Any:
        return jnp.logical_not(self.steps(step))


class Schedule(NamedTuple):
    """A function: step -> whether it is the last of a round; see `scheduled`."""

    ends: introspection.Steps

    def __call__(self, step: Any) -> Any:
        return self.ends(step)


class WithLast(NamedTuple):
    """A function: step -> whether it is in `steps`, or is the last of a training."""

    steps: introspection.Steps
    last: int

    def __call__(self, step: Any) -> Any:
        if isinstance(step, int) and step == self.last:
            return True  # also if the other steps depend on traced numbers
        return jnp.logical_or(self.steps(step), step == self.last)


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
        return when(strategy, scheduled(period))
    period = checks.whole("period", period, least=1)
    offset = checks.whole("every: offset", offset, least=0)
    if offset >= period:
        raise ValueError(
            f"every: offset must be below the period of {period}, got {offset}"
        )
    return strategy if period == 1 else when(strategy, Period(period, offset))


def sync_every(strategy: Strategy, period: int | Callable[[Any], Any]) -> Strategy:
    """`every` for the sync only: reduce acts at all steps."""
    return _sync_gated(strategy, every(strategy._replace(reduce=keep_grads), period))


def sync_when(strategy: Strategy, active: introspection.Steps) -> Strategy:
    """`when` for the sync only: reduce acts at all steps."""
    return _sync_gated(strategy, when(strategy._replace(reduce=keep_grads), active))


def _sync_gated(strategy: Strategy, gated: Strategy) -> Strategy:
    """Makes a whole: its members would lack reduce, which shares their state."""
    landing = introspection.Landing(functools.partial(introspection.lands, gated))
    sync = introspection.Combination(gated.sync, kind=landing)
    return strategy._replace(sync=sync, acts=gated.acts)


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
    _check_arrived(strategy, steps)
    return _phase(lambda step: step < steps, strategy, lambda x: until(x, steps))


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
    phase = _phase(lambda step: step >= steps, strategy, lambda x: after(x, steps))

    def reduce(grads, replica, state, step):
        # An anchor from step 0 would be stale: BMUF after 20 synchronous steps would
        # start with twenty times its velocity. The state is made here, not in the sync
        # before: a member chained after this one may have moved the params since.
        state = lax.cond(
            step == steps, lambda: _fresh(strategy, replica, state), lambda: state
        )
        return phase.reduce(grads, replica, state, step)

    own = not introspection.reduces(strategy)
    return phase._replace(reduce=OwnGrads(reduce) if own else reduce)


def _fresh(strategy: Strategy, replica: Replica, state: PyTree) -> PyTree:
    """The strategy's first state for the current params; it must fit the old state."""
    return require_same("init", "state", state, strategy.init(replica.params))


def _phase(
    active: introspection.Steps, strategy: Strategy, again: introspection.Change
) -> Strategy:
    """Applies a strategy in a phase; outside, its center is the current params."""
    # Also around combinators that work at every step: outside of its phase a worker
    # that is paced must not be held, and nothing that is delayed may arrive.
    gated = _gated(strategy, introspection.Phase(active), again)
    if not introspection.has_center(strategy):
        return gated

    def following(replica, state, step):
        return lax.cond(
            active(step),
            lambda: apply_sync(strategy, replica, state, step),
            # Makes the state anew at each such step, so that the center of an inactive
            # phase is the current model, and `chain` need not know of phases.
            lambda: (replica, _fresh(strategy, replica, state)),
        )

    # Following the params is an action, so it also acts outside the phase.
    acts = introspection.at_any(
        introspection.acting_steps(strategy), lambda step: jnp.logical_not(active(step))
    )
    sync = introspection.combination(gated)._replace(call=following)
    return gated._replace(sync=sync, acts=acts)


def _check_arrived(strategy: Strategy, end: int) -> None:
    """Refuses a phase that ends while params are under way."""
    for delay, lands in introspection.kinds(strategy, introspection.Delayed):
        if lands is None:
            continue
        with while_tracing():
            late = jax.vmap(lands)(end + jnp.arange(delay))
        if not checks.is_traced(late) and np.any(late):
            raise ValueError(
                f"until: with a delay of {delay}, params sent just before local step "
                f"{end} would arrive only after that step: end the phase {delay} steps "
                "after a sync"
            )


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
    last = checks.whole("at_end: steps", steps, least=1) - 1
    introspection.check_not_steady("at_end", strategy)
    introspection.check_undecided("at_end", strategy)
    if not introspection.ever_syncs(strategy):
        return strategy
    ending = _with_last(strategy, last)
    with jax.ensure_compile_time_eval():
        lands = introspection.lands(ending, last)
    if checks.is_traced(lands) or not lands:
        raise ValueError(
            f"at_end: this strategy cannot sync after step {steps}: its rounds are not "
            "made by `every`, or have a fixed length: end at one of its own syncs"
        )
    return ending


def _with_last(strategy: Strategy, last: int) -> Strategy:
    """The same strategy, with the last step added to each period's steps."""
    made = introspection.combination(strategy)
    if isinstance(made.kind, introspection.Delayed):
        raise ValueError(
            "at_end: strategy is delayed: its last sync would not arrive: leave out "
            f"at_end, and train on after a sync for its delay of {made.kind.delay}"
        )

    def change(member):
        return _with_last(member, last)

    match made.kind:
        case introspection.Gated(Period() | Schedule() as steps):
            return _when(change(*made.members), WithLast(steps, last))
    return introspection.rebuilt(strategy, change) if made.members else strategy


@contextmanager
def while_tracing() -> Iterator[None]:
    """Makes jax compute known values while it traces, as if there were no mesh.

    Inside a map over some axes of a mesh, jax would try to compute a table on the
    devices of that map, and fail.
    """
    with use_abstract_mesh(AbstractMesh((), ())), jax.ensure_compile_time_eval():
        yield


def scheduled(period: Callable[[Any], Any]) -> introspection.Steps:
    """Finds the last steps of rounds with lengths that follow a schedule.

    Args:
        period: local step -> the length of a round that starts there, in local steps.

    Returns:
        step -> whether a round ends with it.
    """
    # The start of a round follows from the lengths of all rounds before it. State could
    # hold it, but state is mapped: under vmap a branch on it would be a select, with
    # collectives in both arms. So tracing makes a table of the first 65,536 steps.

    def length(start):
        steps = jnp.floor(jnp.asarray(period(start), jnp.float32))
        # NaN and infinity mean a round without an end.
        steps = jnp.nan_to_num(steps, nan=LONGEST, posinf=LONGEST)
        return jnp.clip(steps, 1, LONGEST).astype(jnp.int32)

    @functools.cache
    def first_rounds():
        with while_tracing():
            return jax.jit(tabled)(np.arange(TABLED, dtype=np.int32))

    def tabled(steps):
        def one_round(found):
            _, start, is_last = found
            stop = start + lengths[start]
            return start, stop, is_last.at[stop - 1].set(True, mode="drop")

        lengths, first = jax.vmap(length)(steps), jnp.int32(0)
        none = first, first, jnp.zeros(TABLED, bool)
        last, _, is_last = lax.while_loop(
            lambda found: found[1] < TABLED, one_round, none
        )
        return last, is_last

    def ends(step):
        last, is_last = first_rounds()
        start = lax.while_loop(
            lambda start: step - start >= length(start),
            lambda start: start + length(start),
            jnp.where(step < TABLED, step, last),
        )
        known = is_last[jnp.minimum(step, TABLED - 1)]
        return jnp.where(step < TABLED, known, step - start == length(start) - 1)

    # A table of traced numbers must belong to the program in which they are traced, not
    # to a loop or branch inside it that asks first.
    if checks.is_traced(length(0)):
        first_rounds()
    return Schedule(ends)
