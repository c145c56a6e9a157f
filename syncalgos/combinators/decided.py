"""Syncs that the workers' data decide on, noted so that they can be counted."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.combinators.chain import chain
from syncalgos.combinators.introspection import (
    Combination,
    ever_syncs,
    inner_center,
    is_clocked,
    lands,
    reduces,
)
from syncalgos.strategy import Replica, Strategy, apply_sync, check_strategy

Vote = Callable[[Replica, PyTree, Any], Any]
METRIC = "decided"


class Decision(NamedTuple):
    """The last local step at which the workers decided to act; -1 before the first."""

    at: jax.Array


class DecidedState(NamedTuple):
    """The strategy's state, that of what follows it, and the last decision."""

    strategy: PyTree
    then: PyTree
    decision: Decision


def decided(vote: Vote, strategy: Strategy, axis: Axis = WORKERS) -> Strategy:
    """Applies a sync only where a worker asks for it, by its own data.

    At every step each worker votes, and one number is all-reduced. Where any asks for
    it all sync, so that none waits for the others; else nothing more is sent. `every`
    belongs around it: `every(16, decided(…))` votes after every 16 local steps.

    Args:
        vote: (replica, state, step) -> whether this worker asks for a sync: a scalar
            boolean, which may differ between workers. The state is the strategy's.
        strategy: what to apply; it syncs, and reduces no gradients.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the strategy's, and the step of the last decision.
        `DataParallel.run` tells of each step whether it was decided to sync, as
        metrics["decided"], from which `communication` counts what was sent.

    Raises:
        ValueError: no Strategy, one that reduces gradients, never syncs, or acts at
            every step (`delayed`, `paced`), or a vote that is no function.
    """
    if not callable(vote):
        raise ValueError(f"decided: vote must be a function, got {checks.shown(vote)}")
    check_strategy("decided", strategy)
    if reduces(strategy) or not ever_syncs(strategy):
        raise ValueError(
            "decided: a strategy that syncs and does not reduce gradients is needed; "
            "chain others beside it"
        )
    if is_clocked(strategy):
        raise ValueError(
            "decided: this strategy acts at every step, as delayed and paced ones do"
        )
    return _decided(vote, strategy, Strategy(), axis)


def _decided(vote: Vote, strategy: Strategy, then: Strategy, axis: Axis) -> Strategy:
    """`decided`, with what is applied behind the strategy at the same steps."""

    def init(params):
        none = Decision(jnp.int32(-1))
        return DecidedState(strategy.init(params), then.init(params), none)

    def act(replica, state, step):
        replica, own = apply_sync(strategy, replica, state.strategy, step)
        replica, behind = apply_sync(then, replica, state.then, step)
        return replica, DecidedState(own, behind, Decision(jnp.int32(step)))

    def sync(replica, state, step):
        asks = jnp.asarray(vote(replica, state.strategy, step), jnp.float32)
        # Sums of ones are exact in any order: no device decides otherwise than another.
        now = collectives.mean(asks, axis) > 0
        return lax.cond(
            _by_data(now, state.decision.at == step),
            lambda: act(replica, state, step),
            lambda: (replica, state),
        )

    # A whole, as the vote knows the state of what it decides on.
    whole = Combination(
        sync,
        lands=partial(lands, strategy),
        behind=lambda extra: _decided(vote, strategy, chain(then, extra), axis),
    )
    return Strategy(init, sync=whole, center=inner_center(strategy))


@jax.jit
def _by_data(now: jax.Array, noted: jax.Array) -> jax.Array:
    """Returns `now`. The ledger, which cannot know it, takes what was noted.

    A call of this name in a traced program, with an equation in it: else jax would hand
    on what it is given, and leave nothing to be seen.
    """
    return jnp.logical_or(now, False)


BY_DATA = "_by_data"


def found(state: PyTree) -> list[Decision]:
    """The decisions in a strategy's state, in the order of its leaves."""
    return [x for x in _leaves(state) if isinstance(x, Decision)]


def places(state: PyTree) -> list[int]:
    """The numbers of their leaves among all leaves of the state."""
    return [i for i, x in enumerate(_leaves(state)) if isinstance(x, Decision)]


def put(state: PyTree, decisions: list[Decision]) -> PyTree:
    """The state with other decisions in place of its own."""
    rest = iter(decisions)
    return jax.tree.map(
        lambda x: next(rest) if isinstance(x, Decision) else x, state, is_leaf=_is_one
    )


def noted(state: PyTree, step: Any) -> dict[str, jax.Array]:
    """As metrics of a step: which decisions were to act, (decisions,) booleans.

    Empty where nothing is decided. Leaves may lead with lanes, which are equal.
    """
    acts = [jnp.ravel(decision.at)[0] == step for decision in found(state)]
    return {METRIC: jnp.stack(acts)} if acts else {}


def _is_one(x: Any) -> bool:
    return isinstance(x, Decision)


def _leaves(state: PyTree) -> list[Any]:
    """The leaves, each decision as one: it has but one leaf."""
    return jax.tree.leaves(state, is_leaf=_is_one)
