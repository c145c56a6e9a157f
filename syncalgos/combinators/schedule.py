"""Strategies that act at some steps only."""

import functools
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
from syncalgos.former_calls import accepts_former
from syncalgos.strategy import (
    Replica,
    Strategy,
    apply_reduce,
    apply_sync,
    check_strategy,
    keep_grads,
    keep_replica,
    require_same,
)

TABLED = 2**16
"""Local steps whose rounds are looked up; later ones are walked to."""

LONGEST = 2**30
"""Local steps in a round that has no end."""


@accepts_former("active strategy", swaps=True)
def when(strategy: Strategy, active: introspection.Steps) -> Strategy:
    """Applies a strategy only at steps where `active(step)`; else nothing is sent.

    Args:
        strategy: what to apply. `delayed`, `paced` and `ema` go on at every step: the
            condition applies to the strategy inside of them.
        active: local step -> whether to act: a scalar boolean, the same on all workers.

    Returns:
        A Strategy. State: the strategy's. It acts where `active` holds and the
        strategy acts.

    Raises:
        ValueError: an argument of another kind, or a strategy that must act at every
            step, as `async_diloco`.

    Example:
        >>> import numpy as np
        >>> from syncalgos import average, communication, when
        >>> strategy = when(average(), lambda step: step == 3)
        >>> sent = communication(strategy, np.ones(10, np.float32), workers=2, steps=6)
        >>> sent.per_step
        array([ 0.,  0.,  0., 40., 40., 40.])
    """
    if not callable(active):
        raise ValueError(f"when: active must be a function, got {checks.shown(active)}")
    check_strategy("when", strategy)
    introspection.check_not_steady("when", strategy)
    return _when(strategy, active)


def _when(strategy: Strategy, active: introspection.Steps) -> Strategy:
    """`when`, without its checks."""
    if introspection.is_clocked(strategy):
        # Around it, a delayed result would wait for the next period.
        return introspection.rebuilt(strategy, lambda member: _when(member, active))

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

    gated = introspection.Combination(
        # A sync that keeps everything needs no branch.
        sync if introspection.ever_acts(strategy) else keep_replica,
        (strategy,),
        lambda change: _when(change(strategy), active),
        condition=active,
    )
    return strategy._replace(
        reduce=reduce if introspection.reduces(strategy) else keep_grads,
        sync=gated,
        acts=introspection.at_both(active, introspection.acting_steps(strategy)),
    )


class Period(NamedTuple):
    """step -> whether it is one of offset, offset + period, …, counted from 1.

    Attributes:
        period: local steps, at least 1.
        offset: local steps, below the period.
    """

    period: int
    offset: int

    def __call__(self, step: Any) -> Any:
        return (step + 1 - self.offset) % self.period == 0


class Schedule(NamedTuple):
    """step -> whether it is the last of a round; see `scheduled`."""

    ends: introspection.Steps

    def __call__(self, step: Any) -> Any:
        return self.ends(step)


class WithLast(NamedTuple):
    """step -> whether it is one of some steps, or the last of a training."""

    steps: introspection.Steps
    last: int

    def __call__(self, step: Any) -> Any:
        if isinstance(step, int) and step == self.last:
            return True  # also where the other steps follow from traced numbers
        return jnp.logical_or(self.steps(step), step == self.last)


@accepts_former("period strategy offset", swaps=True)
def every(
    strategy: Strategy, period: int | Callable[[Any], Any], *, offset: int = 0
) -> Strategy:
    """Applies a strategy after local steps period, 2 · period, …

    Args:
        strategy: what to apply.
        period: local steps between syncs, at least 1, on the absolute clock. Or a
            schedule, local step -> steps, of jax operations: asked at the first step of
            a round for its length, taken down to a whole number and up to 1.
        offset: with it, after local steps offset, offset + period, …; below period.

    Returns:
        A Strategy; see `when`. With a period of 1, the strategy itself.

    Raises:
        ValueError: a period that is no whole number of at least 1, an offset outside
            0 … period - 1, or a strategy that must act at every step.

    Example:
        >>> import numpy as np
        >>> from syncalgos import average, communication, every
        >>> strategy = every(average(), 4)
        >>> sent = communication(strategy, np.ones(10, np.float32), workers=2, steps=12)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 4,  8, 12])
    """
    if callable(period):
        check_strategy("every", strategy)
        if offset:
            raise ValueError(f"every: a schedule takes no offset, got {offset}")
        return when(strategy, scheduled(period))
    period = checks.whole("period", period, least=1)
    check_strategy("every", strategy)
    offset = checks.whole("every: offset", offset, least=0)
    if offset >= period:
        raise ValueError(
            f"every: offset must be below the period of {period}, got {offset}"
        )
    return strategy if period == 1 else when(strategy, Period(period, offset))


def sync_every(strategy: Strategy, period: int | Callable[[Any], Any]) -> Strategy:
    """`every` for the sync alone: the reduction acts at all steps."""
    return _sync_gated(strategy, every(strategy._replace(reduce=keep_grads), period))


def sync_when(strategy: Strategy, active: introspection.Steps) -> Strategy:
    """`when` for the sync alone: the reduction acts at all steps."""
    return _sync_gated(strategy, when(strategy._replace(reduce=keep_grads), active))


def _sync_gated(strategy: Strategy, gated: Strategy) -> Strategy:
    """A whole: its members would lack the reduction, which shares their state."""
    landing = functools.partial(introspection.lands, gated)
    sync = introspection.Combination(gated.sync, lands=landing)
    return strategy._replace(sync=sync, acts=gated.acts)


@accepts_former("s strategy", swaps=True)
def until(strategy: Strategy, s: int) -> Strategy:
    """Applies a strategy at steps 0 … s-1.

    Where it has a center of its own, its state is `init` of the current params from
    step s on, as in `after` before s: the center does not go stale as others train on.
    It is each worker's own where replicas differ; `DataParallel` averages it.

    Args:
        strategy: what to apply.
        s: local steps, at least 0.

    Returns:
        A Strategy. State: the strategy's.

    Raises:
        ValueError: s that is no whole number of at least 0.

    Example:
        >>> import numpy as np
        >>> from syncalgos import after, bmuf, chain, communication, sync_sgd, until
        >>> strategy = chain(until(sync_sgd(), 3), after(bmuf(4), 3))
        >>> sent = communication(strategy, np.ones(10, np.float32), workers=2, steps=8)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([1, 2, 3, 4, 8])
    """
    s = checks.whole("until: s", s, least=0)
    check_strategy("until", strategy)
    return _phase(
        lambda step: step < s, strategy, lambda change: until(change(strategy), s)
    )


@accepts_former("s strategy", swaps=True)
def after(strategy: Strategy, s: int) -> Strategy:
    """Applies a strategy at steps s, s+1, …, its anchors starting at step s.

    Its state is made anew by `init` from the params held at step s. Where the strategy
    has a center of its own, its state follows the params before s, so that the center
    is the current model. The replicas should agree at step s, as they do after a sync
    at s-1; else each worker's anchor starts from its own replica. `every` belongs
    inside, `after(every(…, period), s)`.

    Args:
        strategy: what to apply.
        s: local steps, at least 0.

    Returns:
        A Strategy. State: the strategy's.

    Raises:
        ValueError: s that is no whole number of at least 0.

    Example:
        >>> import numpy as np
        >>> from syncalgos import after, communication, diloco
        >>> strategy = after(diloco(4), 6)
        >>> sent = communication(strategy, np.ones(10, np.float32), workers=2, steps=16)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 8, 12, 16])
    """
    s = checks.whole("after: s", s, least=0)
    check_strategy("after", strategy)
    phase = _phase(
        lambda step: step >= s, strategy, lambda change: after(change(strategy), s)
    )

    def reduce(grads, replica, state, step):
        # Made at step 0 the anchor would be stale: BMUF after 20 synchronous steps
        # would start with twenty times its velocity. And here, not in the sync before:
        # a member chained behind this one may have moved the params since.
        state = lax.cond(
            step == s, lambda: _fresh(strategy, replica, state), lambda: state
        )
        return phase.reduce(grads, replica, state, step)

    return phase._replace(reduce=reduce)


def _fresh(strategy: Strategy, replica: Replica, state: PyTree) -> PyTree:
    """The strategy's first state for the params of now, in the form of the old one."""
    return require_same("init", "state", state, strategy.init(replica.params))


def _phase(
    active: introspection.Steps,
    strategy: Strategy,
    rebuild: Callable[[introspection.Change], Strategy],
) -> Strategy:
    """`when`, but with a center that outside its steps is the current params."""
    gated = _when(strategy, active)
    follows = introspection.has_center(strategy)

    def following(replica, state, step):
        return lax.cond(
            active(step),
            lambda: apply_sync(strategy, replica, state, step),
            # A copy of the state at each such step, so that the center of a phase that
            # is not active is today's model, and `chain` need not know of phases.
            lambda: (replica, _fresh(strategy, replica, state)),
        )

    sync = introspection.Combination(
        following if follows else gated.sync,
        (strategy,),
        rebuild,
        lambda step: jnp.logical_and(active(step), introspection.lands(strategy, step)),
    )
    # To follow is to act: outside of its steps, too.
    acts = introspection.at_any(
        introspection.acting_steps(strategy), lambda step: jnp.logical_not(active(step))
    )
    return gated._replace(sync=sync, acts=acts if follows else gated.acts)


@accepts_former("steps strategy", swaps=True)
def at_end(strategy: Strategy, steps: int) -> Strategy:
    """Syncs after the last local step of a training, too.

    A training of 240 local steps with a period of 64 has its last sync after 192: the
    center lacks 48 steps. With this, the strategy's own sync acts after step 240 as
    well, in the middle of a round. It sends as much as any other, and is counted.

    Args:
        strategy: whose syncs are made by `every`, be it inside of other combinators.
        steps: local steps of the training, at least 1.

    Returns:
        A Strategy. State: the strategy's. A strategy that never syncs, or syncs at that
        step anyway, is returned as it is.

    Raises:
        ValueError: a number of steps below 1, or a strategy whose syncs at other steps
            have no meaning: delayed, of workers that do not wait, decided by the data,
            or of rounds of a fixed length, such as scaffold.

    Example:
        >>> import numpy as np
        >>> from syncalgos import at_end, bmuf, communication
        >>> strategy = at_end(bmuf(4), 10)
        >>> sent = communication(strategy, np.ones(10, np.float32), workers=2, steps=10)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 4,  8, 10])
    """
    last = checks.whole("at_end: steps", steps, least=1) - 1
    check_strategy("at_end", strategy)
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
            "made by `every`, or need their length; end it at one of its own syncs"
        )
    return ending


def _with_last(strategy: Strategy, last: int) -> Strategy:
    """The same strategy, of which each period has one step more."""
    made = introspection.combination(strategy)
    if made.delays:
        raise ValueError("at_end: delayed, the last step's results would not arrive")

    def change(member):
        return _with_last(member, last)

    if isinstance(made.condition, Period | Schedule):
        [member] = made.members
        return _when(change(member), WithLast(made.condition, last))
    return introspection.rebuilt(strategy, change) if made.members else strategy


@contextmanager
def while_tracing() -> Iterator[None]:
    """Computes what is known now, and as if there were no mesh.

    In a map over some axes of a mesh jax would compute a table on the devices of that
    map, and cannot.
    """
    with use_abstract_mesh(AbstractMesh((), ())), jax.ensure_compile_time_eval():
        yield


def scheduled(period: Callable[[Any], Any]) -> introspection.Steps:
    """The last steps of rounds whose lengths follow a schedule.

    Args:
        period: local step -> the length of a round that starts there, in local steps.

    Returns:
        step -> whether a round ends with it.
    """
    # Where a round starts follows from the lengths of all before it. State could carry
    # it, but state is mapped, and a branch on it would be a select under vmap, with
    # collectives in both arms: so the first 65,536 steps are tabled at trace time.

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

    # What is made of traced numbers belongs to the program that they are traced in, and
    # not to a loop or branch inside of it that asks first.
    if checks.is_traced(length(0)):
        first_rounds()
    return Schedule(ends)
