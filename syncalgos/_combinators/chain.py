"""Several strategies, one after the other."""

import functools
from collections.abc import Callable
from operator import or_

from syncalgos._combinators import introspection, rules
from syncalgos.collectives import PyTree
from syncalgos.collectives._peers import Peers
from syncalgos.steps import NEVER
from syncalgos.strategy import MeanCenter, Strategy, check_strategy, factory


@factory
def chain(*strategies: Strategy) -> Strategy:
    """Applies strategies one after the other, in reduce and in sync.

    Args:
        *strategies: the members, in the order in which to apply them.

    Returns:
        A Strategy. State: the tuple of the members' states. Its center is that of the
        last member that defines its own, else the mean of the replicas; with `masked`
        members this holds leaf by leaf. It acts at each step at which a member acts. A
        declaration that any member makes also holds for the chain; its `late` is the
        smallest of the members that send.

    Raises:
        ValueError: an argument is not a Strategy; members send over Peers and over
            another axis; or `paced` comes after a member that syncs at the same steps,
            whose result resting workers would lose.

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
    _check_paces(strategies)
    _check_peers(strategies)

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
        introspection.reduce_like(reduce, *strategies),
        introspection.Combination(sync, strategies, chain),
        _chained_center(strategies),
        functools.reduce(or_, map(introspection.acting_steps, strategies), NEVER),
        sees_loss=any(each.sees_loss for each in strategies),
        axis=introspection.axis_of(*strategies),
        late=min((x.late for x in strategies if introspection.sends(x)), default=0),
        unit_steps=any(each.unit_steps for each in strategies),
        own_momentum=any(each.own_momentum for each in strategies),
    )


def _check_paces(strategies: tuple[Strategy, ...]) -> None:
    """Refuses `paced` after another sync, which workers that rest would undo."""
    has_synced = False
    for strategy in strategies:
        if any(map(introspection.is_phase, introspection.parts(strategy))):
            continue  # at other steps
        if has_synced and rules.KINDS["paced"](strategy):
            raise rules.make_error("chain", "paced after a sync")
        has_synced |= introspection.ever_syncs(strategy)


def _check_peers(strategies: tuple[Strategy, ...]) -> None:
    """Refuses Peers beside another axis, along which nothing would be mapped."""
    sending = filter(introspection.sends, strategies)
    axes = [introspection.axis_of(strategy) for strategy in sending]
    peers = next((axis for axis in axes if isinstance(axis, Peers)), None)
    others = [axis for axis in axes if axis != peers]
    if peers is not None and others:
        raise ValueError(
            f"chain: one member sends over {peers}, and another over {others[0]}: make "
            "one Peers, and give it as axis to every member that sends"
        )


def _chained_center(
    strategies: tuple[Strategy, ...],
) -> Callable[[PyTree, PyTree], PyTree]:
    """The center of the last strategy that has its own, else the mean of replicas."""
    means = [introspection.mean_center(strategy) for strategy in strategies]
    # A center of all leaves replaces all centers before it.
    first = max((i for i, mean in enumerate(means) if mean is None), default=0)

    def over(rest, params, state):
        for strategy, own in [*zip(strategies, state, strict=True)][first:]:
            rest = introspection.center_over(strategy, rest, params, own)
        return rest

    if None in means:
        return functools.partial(over, None)
    parts = over if any(map(introspection.has_center, strategies)) else None
    return MeanCenter(introspection.axis_of(*strategies), parts)
