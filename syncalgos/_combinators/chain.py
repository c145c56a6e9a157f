"""Several strategies, one after the other."""

import functools
from collections.abc import Callable
from operator import or_
from typing import Any

from syncalgos._combinators import introspection, rules
from syncalgos.collectives import PyTree
from syncalgos.collectives._peers import Peers
from syncalgos.steps import NEVER
from syncalgos.strategy import (
    MeanCenter,
    Replica,
    Strategy,
    check_strategy,
    factory,
)


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

    def init(params: PyTree) -> tuple[PyTree, ...]:
        return tuple(strategy.init(params) for strategy in strategies)

    def reduce(
        grads: PyTree, replica: Replica, state: tuple[PyTree, ...], step: Any
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        states = []
        for strategy, member_state in zip(strategies, state, strict=True):
            grads, member_state = strategy.reduce(grads, replica, member_state, step)
            states.append(member_state)
        return grads, tuple(states)

    def sync(
        replica: Replica, state: tuple[PyTree, ...], step: Any
    ) -> tuple[Replica, tuple[PyTree, ...]]:
        states = []
        for strategy, member_state in zip(strategies, state, strict=True):
            replica, member_state = strategy.sync(replica, member_state, step)
            states.append(member_state)
        return replica, tuple(states)

    acting_steps = map(introspection.acting_steps, strategies)
    return Strategy(
        init=init,
        reduce=introspection.reduce_like(reduce, *strategies),
        sync=introspection.Combination(sync, strategies, chain),
        center=_chain_centers(strategies),
        acts=functools.reduce(or_, acting_steps, NEVER),
        sees_loss=any(member.sees_loss for member in strategies),
        axis=introspection.find_axis(*strategies),
        late=min((x.late for x in strategies if introspection.sends(x)), default=0),
        unit_steps=any(member.unit_steps for member in strategies),
        own_momentum=any(member.own_momentum for member in strategies),
    )


def _check_paces(strategies: tuple[Strategy, ...]) -> None:
    """Refuses `paced` after another sync, which workers that rest would undo."""
    has_synced = False
    for strategy in strategies:
        if any(map(introspection.is_phase, introspection.walk_strategies(strategy))):
            continue  # at other steps
        if has_synced and rules.KINDS["paced"](strategy):
            raise rules.make_error("chain", "paced after a sync")
        has_synced |= introspection.ever_syncs(strategy)


def _check_peers(strategies: tuple[Strategy, ...]) -> None:
    """Refuses Peers beside another axis, along which nothing would be mapped."""
    sending = filter(introspection.sends, strategies)
    axes = [introspection.find_axis(strategy) for strategy in sending]
    peers = next((axis for axis in axes if isinstance(axis, Peers)), None)
    other_axes = [axis for axis in axes if axis != peers]
    if peers is not None and other_axes:
        raise ValueError(
            f"chain: one member sends over {peers}, and another over {other_axes[0]}: "
            "make one Peers, and give it as axis to every member that sends"
        )


def _chain_centers(
    strategies: tuple[Strategy, ...],
) -> Callable[[PyTree, PyTree], PyTree]:
    """The center of the last strategy that has its own, else the mean of replicas."""
    means = [introspection.mean_center(strategy) for strategy in strategies]
    # A center of all leaves replaces all centers before it.
    first_member = max((i for i, mean in enumerate(means) if mean is None), default=0)

    def replace_centers(center: PyTree, params: PyTree, state: PyTree) -> PyTree:
        pairs = list(zip(strategies, state, strict=True))
        for strategy, member_state in pairs[first_member:]:
            center = introspection.center_over(strategy, center, params, member_state)
        return center

    if None in means:
        return functools.partial(replace_centers, None)
    over = replace_centers if any(map(introspection.has_center, strategies)) else None
    return MeanCenter(introspection.find_axis(*strategies), over)
