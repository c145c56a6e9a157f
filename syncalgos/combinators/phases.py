"""Strategies for a part of the training: until a step, or after one."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from syncalgos import checks, contract
from syncalgos import strategy as base
from syncalgos.combinators import introspection
from syncalgos.combinators.introspection import Composed
from syncalgos.strategy import MeanCenter, Strategy, when


def until(s: int, strategy: Strategy) -> Strategy:
    """Applies a strategy at steps 0 … s-1.

    Where it has a center of its own, its state is `init` of the current params from
    step s on, as in `after` before s: the center does not go stale as others train on.
    It is each worker's own where replicas differ; `DataParallel` averages it.

    Raises:
        ValueError: s that is no whole number of at least 0.
    """
    s = checks.whole("until: s", s, least=0)
    base.check_strategy("until", strategy)
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
    base.check_strategy("after", strategy)
    phase = _phase(
        lambda step: step >= s, strategy, lambda change: after(s, change(strategy))
    )

    def reduce(grads, replica, state, step):
        # A member chained behind this one may have moved the params since our sync.
        state = lax.cond(
            step == s,
            lambda: contract.require_same(
                "init", "state", state, strategy.init(replica.params)
            ),
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
            lambda: contract.apply_sync(strategy, replica, state, step),
            lambda: (
                replica,
                contract.require_same(
                    "init", "state", state, strategy.init(replica.params)
                ),
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
