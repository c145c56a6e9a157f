"""Changes local steps after the inner optimizer has made them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos.collectives import PyTree
from syncalgos.combinators.asynchrony import require_inner
from syncalgos.combinators.introspection import Combination, inner_center
from syncalgos.dtypes import narrow, widen
from syncalgos.strategy import OwnGrads, Replica, Strategy


class ChangedState(NamedTuple):
    """State of `changed_steps`.

    Attributes:
        strategy: the strategy's state.
        before: params, at least float32 and not rounded to their own dtype, and
            opt_state before the local step.
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
            its center must be computed without sending anything. It is given params of
            at least float32.
        change: (before, after, center, step) -> the replica. `before` holds params and
            opt_state before the local step. These params, the center and the params of
            the result are at least float32.
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
        kept, _ = state.before
        before = params, opt_state = held(replica.params, replica.opt_state)
        require_inner(where, state.before, before)
        # What rounding took from the replica stays, unless others changed its params.
        same = jax.tree.map(jnp.equal, narrow(kept, replica.params), replica.params)
        params = jax.tree.map(jnp.where, same, kept, params)
        return grads, state._replace(before=(params, opt_state))

    def sync(replica, state, step):
        params, last = state.before
        opt_state = replica.opt_state if optimizer is None else last
        before = replica._replace(params=params, opt_state=opt_state)
        center = strategy.center(params, state.strategy)
        changed = change(before, replica, center, step)
        changed, own = strategy.sync(changed, state.strategy, step)
        params = changed.params
        rounded = changed._replace(params=narrow(params, replica.params))
        return rounded, ChangedState(own, (params, last))

    def rebuild(other):
        return changed_steps(where, other(strategy), change, optimizer)

    return strategy._replace(
        init=init,
        reduce=OwnGrads(note),
        sync=Combination(sync, (strategy,), rebuild, kind="clocked"),
        center=inner_center(strategy),
        acts=None,
    )
