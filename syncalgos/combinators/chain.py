"""Several strategies, one after the other."""

import functools
from collections.abc import Callable

from syncalgos.collectives import WORKERS, PyTree
from syncalgos.combinators.introspection import (
    Combination,
    acting_steps,
    at_any,
    center_over,
    has_center,
    has_whole_center,
    reduces,
)
from syncalgos.strategy import MeanCenter, Strategy, check_strategy, keep_grads


def chain(*strategies: Strategy) -> Strategy:
    """Applies strategies one after the other, in reduce and in sync.

    Args:
        *strategies: what to apply, in this order.

    Returns:
        A Strategy. State: the tuple of theirs. Its center is that of the last one that
        defines its own, else the mean of the replicas: leaf by leaf, where members are
        `masked`. It acts at each step at which a member does.

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

    return Strategy(
        init,
        reduce if any(map(reduces, strategies)) else keep_grads,
        Combination(sync, strategies, lambda change: chain(*map(change, strategies))),
        _chained_center(strategies),
        at_any(*map(acting_steps, strategies)),
    )


def _chained_center(
    strategies: tuple[Strategy, ...],
) -> Callable[[PyTree, PyTree], PyTree]:
    """The center of the last strategy with its own, else the mean over their axis."""
    whole = [i for i, each in enumerate(strategies) if has_whole_center(each)]
    # Nothing of a center before the last whole one is left.
    first = whole[-1] if whole else 0

    def over(rest, params, state):
        for strategy, own in [*zip(strategies, state, strict=True)][first:]:
            rest = center_over(strategy, rest, params, own)
        return rest

    if whole:
        return functools.partial(over, None)
    axes = [strategy.center.axis for strategy in strategies]
    own_axes = [axis for axis in axes if axis != WORKERS]
    axis = own_axes[-1] if own_axes else WORKERS
    return MeanCenter(axis, over if any(map(has_center, strategies)) else None)
