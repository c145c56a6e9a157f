"""The idea: a strategy is four pure functions, and combinators make new ones of old.

The functions run inside a mapped function (pmap, shard_map, vmap). Each sees one
worker's view and talks to the others only through collectives over named axes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from syncalgos import checks, collectives, contract
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.combinators import introspection, rounds
from syncalgos.combinators.introspection import Composed, keep_grads, keep_replica


class Replica(NamedTuple):
    """What one worker holds.

    Attributes:
        params: the trained parameters, a pytree of float arrays.
        opt_state: the inner optimizer's state.
        buffers: state that is not trained, such as batch statistics.
    """

    params: PyTree
    opt_state: PyTree = ()
    buffers: PyTree = ()


class MeanCenter(NamedTuple):
    """The center of a strategy that has none of its own: the mean of the replicas."""

    axis: Axis = WORKERS

    def __call__(self, params: PyTree, state: PyTree) -> PyTree:
        return collectives.mean(params, self.axis)


class PartCenter(NamedTuple):
    """The center of a strategy that knows it for some leaves only; else the mean.

    Attributes:
        over: (rest, params, state) -> `rest`, its own leaves replaced by their center.
        axis: the axis of the mean.
    """

    over: Callable[[PyTree, PyTree, PyTree], PyTree]
    axis: Axis = WORKERS

    def __call__(self, params: PyTree, state: PyTree) -> PyTree:
        return self.over(collectives.mean(params, self.axis), params, state)


def center_of_inner(center: Any) -> Any:
    """A strategy's center, of the state of one around it, which has it as `strategy`.

    What others know of a center by its type stays to be seen.
    """
    if isinstance(center, MeanCenter):
        return center
    if isinstance(center, PartCenter):
        return center._replace(
            over=lambda rest, params, state: center.over(rest, params, state.strategy)
        )
    return lambda params, state: center(params, state.strategy)


def _no_state(params: PyTree) -> PyTree:
    return ()


_Pair = tuple[Any, Any]


class Strategy(NamedTuple):
    """How the workers' replicas agree.

    `step` counts local steps from 0 and is the same on all workers. Gradients, replicas
    and state keep their structure, shapes and dtypes.

    Attributes:
        init: params -> state; default: none.
        reduce: (grads, replica, state, step) -> (grads, state), before the inner
            optimizer; default: keep.
        sync: (replica, state, step) -> (replica, state), after it; default: keep.
        center: (params, state) -> params, the model to evaluate and ship; default: the
            mean of the replicas.
    """

    init: Callable[[PyTree], PyTree] = _no_state
    reduce: Callable[[PyTree, Replica, PyTree, Any], _Pair] = keep_grads
    sync: Callable[[Replica, PyTree, Any], _Pair] = keep_replica
    center: Callable[[PyTree, PyTree], PyTree] = MeanCenter()


def chain(*strategies: Strategy) -> Strategy:
    """Applies strategies one after the other, in reduce and in sync.

    The center is that of the last one that defines its own, else the mean of the
    replicas: leaf by leaf, where members are `masked`. State: the tuple of theirs.

    Raises:
        ValueError: an argument that is no Strategy.
    """
    for strategy in strategies:
        check_strategy("chain", strategy)

    def init(params):
        return tuple(strategy.init(params) for strategy in strategies)

    def reduce(grads, replica, state, step):
        states = []
        for strategy, own in zip(strategies, state, strict=True):
            grads, own = strategy.reduce(grads, replica, own, step)
            states.append(own)
        return grads, tuple(states)

    def sync(replica, state, step):
        states = []
        for strategy, own in zip(strategies, state, strict=True):
            replica, own = strategy.sync(replica, own, step)
            states.append(own)
        return replica, tuple(states)

    combined = Composed(
        sync,
        members=strategies,
        rebuild=lambda change: chain(*map(change, strategies)),
        lands=lambda step: functools.reduce(
            jnp.logical_or, [introspection.lands(s, step) for s in strategies], False
        ),
        acts=lambda step: functools.reduce(
            jnp.logical_or, [introspection.acts(s, step) for s in strategies], False
        ),
    )
    keeps = all(strategy.reduce is keep_grads for strategy in strategies)
    return Strategy(
        init,
        keep_grads if keeps else reduce,
        combined,
        _chained_center(strategies),
    )


def _chained_center(strategies: tuple[Strategy, ...]) -> Callable:
    """That of the last strategy with its own, else the mean over their axis."""
    centers = [(i, strategy.center) for i, strategy in enumerate(strategies)]
    means = [center for _, center in centers if isinstance(center, MeanCenter)]
    own = [(i, c) for i, c in centers if not isinstance(c, MeanCenter)]
    if not own:
        return next((m for m in reversed(means) if m != MeanCenter()), MeanCenter())
    whole = [(i, c) for i, c in own if not isinstance(c, PartCenter)]
    last, base = whole[-1] if whole else (-1, None)
    parts = [(i, c) for i, c in own if isinstance(c, PartCenter) and i > last]

    def over(rest, params, state):
        for i, center in parts:
            rest = center.over(rest, params, state[i])
        return rest

    if base is None:
        return PartCenter(over, parts[-1][1].axis)
    return lambda params, state: over(base(params, state[last]), params, state)


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
            lambda: contract.apply_reduce(strategy, grads, replica, state, step),
            lambda: (grads, state),
        )

    def sync(replica, state, step):
        return lax.cond(
            active(step),
            lambda: contract.apply_sync(strategy, replica, state, step),
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
        return when(rounds.scheduled(period), strategy)
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


def check_strategy(where: str, strategy: Any) -> None:
    """Raises a ValueError unless it is given a Strategy."""
    if not isinstance(strategy, Strategy):
        called = callable(strategy) and getattr(strategy, "__name__", None)
        hint = f" (call it: {called}())" if called else ""
        got = checks.shown(strategy)
        raise ValueError(f"{where}: expected a Strategy, got {got}{hint}")
