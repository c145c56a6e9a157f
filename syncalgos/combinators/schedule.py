"""Strategies that act at some steps only."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncalgos import checks
from syncalgos.combinators import introspection
from syncalgos.combinators.introspection import Composed
from syncalgos.strategy import (
    MeanCenter,
    Strategy,
    apply_reduce,
    apply_sync,
    check_strategy,
    keep_grads,
    keep_replica,
    require_same,
)

TABLED = 2**16  # local steps whose rounds are looked up; later ones are walked through
LONGEST = 2**30


def when(active: Callable[[Any], Any], strategy: Strategy) -> Strategy:
    """Applies a strategy only at steps where `active(step)`; else nothing is sent.

    Args:
        active: local step -> whether to act: a scalar boolean, the same on all workers.
        strategy: what to apply.

    Raises:
        ValueError: an argument of another kind.
    """
    if not callable(active):
        raise ValueError(f"when: active must be a function, got {checks.shown(active)}")
    check_strategy("when", strategy)
    inner = strategy.sync
    if isinstance(inner, Composed) and introspection.acts_always(inner):
        return inner.rebuild(functools.partial(when, active))

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

    combined = Composed(
        # A default that keeps everything needs no branch.
        strategy.sync if strategy.sync is keep_replica else sync,
        members=(strategy,),
        rebuild=lambda change: when(active, change(strategy)),
        lands=lambda step: jnp.logical_and(
            active(step), introspection.lands(strategy, step)
        ),
        acts=lambda step: jnp.logical_and(
            active(step), introspection.acts(strategy, step)
        ),
        gate=(active, strategy),
    )
    return strategy._replace(
        reduce=keep_grads if strategy.reduce is keep_grads else reduce, sync=combined
    )


class Period(NamedTuple):
    """step -> whether it is one of offset, offset + period, …, counted from 1."""

    period: int
    offset: int

    def __call__(self, step: Any) -> Any:
        return (step + 1 - self.offset) % self.period == 0


def every(
    period: int | Callable[[Any], Any], strategy: Strategy, offset: int = 0
) -> Strategy:
    """Applies a strategy after local steps period, 2 · period, …

    Args:
        period: local steps between syncs, at least 1, on the absolute clock. Or a
            schedule, local step -> steps, of jax operations: asked at the first step of
            a round for its length, taken down to a whole number and up to 1.
        strategy: what to apply.
        offset: with it, after local steps offset, offset + period, …; below period.

    Raises:
        ValueError: a period that is no whole number of at least 1, or an offset outside
            0 … period - 1.
    """
    if callable(period):
        check_strategy("every", strategy)
        if offset:
            raise ValueError(f"every: a schedule takes no offset, got {offset}")
        return when(scheduled(period), strategy)
    period = checks.whole("period", period, least=1)
    check_strategy("every", strategy)
    offset = checks.whole("every: offset", offset, least=0)
    if offset >= period:
        raise ValueError(
            f"every: offset must be below the period of {period}, got {offset}"
        )
    return strategy if period == 1 else when(Period(period, offset), strategy)


def sync_every(period: int, strategy: Strategy) -> Strategy:
    """`every` for the sync alone: the reduction acts at all steps."""
    return _sync_gated(functools.partial(every, period), strategy)


def sync_when(active: Callable[[Any], Any], strategy: Strategy) -> Strategy:
    """`when` for the sync alone: the reduction acts at all steps."""
    return _sync_gated(functools.partial(when, active), strategy)


def _sync_gated(gate: Callable[[Strategy], Strategy], strategy: Strategy) -> Strategy:
    gated = gate(strategy._replace(reduce=keep_grads))
    at_end = Composed(
        gated.sync,
        members=(),
        rebuild=lambda change: strategy,
        lands=lambda step: introspection.lands(gated, step),
        acts=lambda step: introspection.acts(gated, step),
    )
    return strategy._replace(sync=at_end)


def until(s: int, strategy: Strategy) -> Strategy:
    """Applies a strategy at steps 0 … s-1.

    Where it has a center of its own, its state is `init` of the current params from
    step s on, as in `after` before s: the center does not go stale as others train on.
    It is each worker's own where replicas differ; `DataParallel` averages it.

    Raises:
        ValueError: s that is no whole number of at least 0.
    """
    s = checks.whole("until: s", s, least=0)
    check_strategy("until", strategy)
    return _phase(
        lambda step: step < s, strategy, lambda change: until(s, change(strategy))
    )


def after(s: int, strategy: Strategy) -> Strategy:
    """Applies a strategy at steps s, s+1, …, its anchors starting at step s.

    Its state is made anew by `init` from the params held at step s: made at step 0 it
    would be stale, and BMUF after 20 synchronous steps would start with twenty times
    its proper velocity. Where the strategy has a center of its own, its state follows
    the params before s, so that the center is the current model. The replicas should
    agree at step s, as they do after a sync at s-1; else each worker's anchor starts
    from its own replica. `every` belongs inside, `after(s, every(period, …))`.

    Raises:
        ValueError: s that is no whole number of at least 0.
    """
    s = checks.whole("after: s", s, least=0)
    check_strategy("after", strategy)
    phase = _phase(
        lambda step: step >= s, strategy, lambda change: after(s, change(strategy))
    )

    def reduce(grads, replica, state, step):
        # A member chained behind this one may have moved the params since our sync.
        state = lax.cond(
            step == s,
            lambda: require_same("init", "state", state, strategy.init(replica.params)),
            lambda: state,
        )
        return phase.reduce(grads, replica, state, step)

    return phase._replace(reduce=reduce)


def _phase(
    active: Callable[[Any], Any],
    strategy: Strategy,
    rebuild: Callable[[Callable[[Strategy], Strategy]], Strategy],
) -> Strategy:
    """`when`, but with a center that outside its steps is the current params."""
    gated = when(active, strategy)
    follows = not isinstance(strategy.center, MeanCenter)

    def sync(replica, state, step):
        return lax.cond(
            active(step),
            lambda: apply_sync(strategy, replica, state, step),
            lambda: (
                replica,
                require_same("init", "state", state, strategy.init(replica.params)),
            ),
        )

    combined = Composed(
        sync if follows else gated.sync,
        members=(strategy,),
        rebuild=rebuild,
        lands=lambda step: jnp.logical_and(
            active(step), introspection.lands(strategy, step)
        ),
        acts=lambda step: jnp.where(
            active(step), introspection.acts(strategy, step), follows
        ),
    )
    return gated._replace(sync=combined)


def scheduled(period: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """step -> whether a round ends with it, when period(s) is the length from s on.

    Where a round starts follows from the lengths of all before it. State could carry
    it, but state is each worker's own, and a branch on it would be no branch under
    vmap: so it is found from the step alone, in a table of the first rounds.
    """

    def length(start):
        steps = jnp.floor(jnp.asarray(period(start), jnp.float32))
        # No number or infinity is a round without an end.
        steps = jnp.nan_to_num(steps, nan=LONGEST, posinf=LONGEST)
        return jnp.clip(steps, 1, LONGEST).astype(jnp.int32)

    @functools.cache
    def first_rounds():
        with jax.ensure_compile_time_eval():
            steps = np.arange(TABLED, dtype=np.int32)
            lengths = np.asarray(jax.jit(jax.vmap(length))(steps))
        starts = [0]
        while (start := starts[-1] + int(lengths[starts[-1]])) < TABLED:
            starts.append(start)
        return np.array(starts, np.int32)

    def ends(step):
        starts = first_rounds()
        at = jnp.searchsorted(jnp.asarray(starts), step, side="right") - 1
        start = lax.while_loop(
            lambda start: step - start >= length(start),
            lambda start: start + length(start),
            jnp.asarray(starts)[at],
        )
        return step - start == length(start) - 1

    return ends
