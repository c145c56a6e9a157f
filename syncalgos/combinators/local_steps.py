"""Local steps that a strategy changes once the inner optimizer has made them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from syncalgos.collectives import PyTree
from syncalgos.combinators.introspection import Combination, inner_center
from syncalgos.dtypes import widen
from syncalgos.strategy import Replica, Strategy


class ChangedState(NamedTuple):
    """State of `changed_steps`.

    Attributes:
        strategy: the strategy's own.
        before: params, at least float32, and opt_state before the local step.
    """

    strategy: PyTree
    before: tuple[PyTree, PyTree]


def changed_steps(
    strategy: Strategy,
    change: Callable[[Replica, Replica, PyTree, Any], Replica],
    optimizer: optax.GradientTransformation | None,
) -> Strategy:
    """Changes every local step before the strategy's sync, by where it began.

    Args:
        strategy: what follows at its syncs; it must reduce no gradients, and have a
            center that needs nothing sent.
        change: (before, after, center, step) -> the replica. `before` has params, at
            least float32, and opt_state as the local step found them.
        optimizer: the inner one; None: its state is not held, and `before` has that
            after the step.

    Returns:
        A Strategy. State: the strategy's, and params and opt_state before the step. It
        acts at every local step, and sends what the strategy sends.
    """

    def held(params, opt_state):
        return widen(params), () if optimizer is None else opt_state

    def init(params):
        opt_state = () if optimizer is None else optimizer.init(params)
        return ChangedState(strategy.init(params), held(params, opt_state))

    def reduce(grads, replica, state, step):
        return grads, state._replace(before=held(replica.params, replica.opt_state))

    def sync(replica, state, step):
        params, opt_state = state.before
        opt_state = replica.opt_state if optimizer is None else opt_state
        before = replica._replace(params=params, opt_state=opt_state)
        center = strategy.center(replica.params, state.strategy)
        replica = change(before, replica, center, step)
        replica, own = strategy.sync(replica, state.strategy, step)
        return replica, state._replace(strategy=own)

    def rebuild(other):
        return changed_steps(other(strategy), change, optimizer)

    return strategy._replace(
        init=init,
        reduce=reduce,
        sync=Combination(sync, (strategy,), rebuild),
        center=inner_center(strategy),
        acts=None,
    )
