"""Several strategies, one after the other."""

import functools
from collections.abc import Callable

import jax.numpy as jnp

from syncalgos.combinators import introspection
from syncalgos.combinators.introspection import Composed
from syncalgos.strategy import (
    MeanCenter,
    PartCenter,
    Strategy,
    check_strategy,
    keep_grads,
)


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
