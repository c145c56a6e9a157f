"""Changes local steps after the inner optimizer has made them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from syncalgos.collectives import PyTree
from syncalgos.combinators.asynchrony import require_inner
from syncalgos.combinators.introspection import Combination, inner_center
from syncalgos.dtypes import widen
from syncalgos.strategy import OwnGrads, Replica, Strategy


class ChangedState(NamedTuple):
    """State of `changed_steps`.

    Attributes:
        strategy: the strategy's state.
        before: params, at least float32, and opt_state before the local step.
    """

    strategy: PyTree
    before: tuple[PyTree, PyTree]


def changed_steps(
    where: str,
    strategy: Strategy,
    change: Callable[[Replica, Replica, PyTree, Any], Replica],
    optimizer: optax.GradientTransformation | None,
) -> Strategy:
    """Changes every local step, given its start, before the strategy's sync.

    Args:
        where: the algorithm, for error messages.
        strategy: the strategy that syncs afterwards; it must not reduce gradients, and
            its center must be computed without sending anything.
        change: (before, after, center, step) -> the replica. `before` holds params, at
            least float32, and opt_state before the local step.
        optimizer: the inner optimizer; None: its state is not kept, and `before` holds
            opt_state after the step.

    Returns:
        A Strategy. State: the strategy's, and params and opt_state before the step. It
        acts at every local step, and sends the same as the strategy.
    """

    def held(params, opt_state):
        return widen(params), () if optimizer is None else opt_state

    def init(params):
        opt_state = () if optimizer is None else optimizer.init(params)
        return ChangedState(strategy.init(params), held(params, opt_state))

    def note(grads, replica, state, step):
        before = held(replica.params, replica.opt_state)
        require_inner(where, state.before, before)
        return grads, state._replace(before=before)

    def sync(replica, state, step):
        params, opt_state = state.before
        opt_state = replica.opt_state if optimizer is None else opt_state
        before = replica._replace(params=params, opt_state=opt_state)
        center = strategy.center(replica.params, state.strategy)
        replica = change(before, replica, center, step)
        replica, own = strategy.sync(replica, state.strategy, step)
        return replica, state._replace(strategy=own)

    def rebuild(other):
        return changed_steps(where, other(strategy), change, optimizer)

    return strategy._replace(
        init=init,
        reduce=OwnGrads(note),
        sync=Combination(sync, (strategy,), rebuild, kind="clocked"),
        center=inner_center(strategy),
        acts=None,
    )
