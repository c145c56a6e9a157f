"""Several strategies, one after the other."""

import functools
from collections.abc import Callable

from syncalgos.collectives import PyTree
from syncalgos.combinators import introspection
from syncalgos.strategy import MeanCenter, Strategy, check_strategy, keep_grads


def chain(*strategies: Strategy) -> Strategy:
    """Applies strategies one after the other, in reduce and in sync.

    Args:
        *strategies: what to apply, in this order.

    Returns:
        A Strategy. State: the tuple of theirs. Its center is that of the last one that
        defines its own, else the mean of the replicas: leaf by leaf, where members are
        `masked`. It acts at each step at which a member does, declares what any of them
        does, and is `late` by the least of theirs.

    Raises:
        ValueError: an argument that is no Strategy.

    Example:
        >>> import optax
        >>> from syncalgos import average, chain, every, reset
        >>> agree = chain(average(), reset(optax.sgd(0.1)))
        >>> strategy = every(agree, 16)
        >>> [strategy.acts(step) for step in (14, 15)]
        [False, True]
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
        reduce if any(map(introspection.reduces, strategies)) else keep_grads,
        introspection.Combination(
            sync, strategies, lambda change: chain(*map(change, strategies))
        ),
        _chained_center(strategies),
        introspection.at_any(*map(introspection.acting_steps, strategies)),
        sees_loss=any(each.sees_loss for each in strategies),
        axis=introspection.axis_of(*strategies),
        late=min((each.late for each in strategies), default=0),
        unit_steps=any(each.unit_steps for each in strategies),
        own_momentum=any(each.own_momentum for each in strategies),
    )


def _chained_center(
    strategies: tuple[Strategy, ...],
) -> Callable[[PyTree, PyTree], PyTree]:
    """The center of the last strategy with its own, else the mean over their axis."""
    means = [introspection.mean_center(strategy) for strategy in strategies]
    # Nothing is left of a center before the last one that is of all leaves.
    first = max((i for i, mean in enumerate(means) if mean is None), default=0)

    def over(rest, params, state):
        for strategy, own in [*zip(strategies, state, strict=True)][first:]:
            rest = introspection.center_over(strategy, rest, params, own)
        return rest

    if None in means:
        return functools.partial(over, None)
    parts = over if any(map(introspection.has_center, strategies)) else None
    return MeanCenter(introspection.axis_of(*strategies), parts)
