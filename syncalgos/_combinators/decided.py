"""Syncs decided by the workers' data; decisions are recorded to count the bytes."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from syncalgos import checks, collectives
from syncalgos._combinators import introspection, rules
from syncalgos._combinators.chain import chain
from syncalgos.collectives import PyTree
from syncalgos.collectives._axes import COUNTED
from syncalgos.strategy import Replica, Strategy, apply_sync, check_strategy, factory

Vote = Callable[[Replica, PyTree, Any], Any]
METRIC = "decided"


class Decision(NamedTuple):
    """The last local step at which the workers decided to act; -1 before the first."""

    at: jax.Array


class DecidedState(NamedTuple):
    """State of `decided`.

    Attributes:
        strategy: the strategy's state.
        then: the state of the strategy applied after it; see `at_syncs`.
        decision: the last decision.
    """

    strategy: PyTree
    then: PyTree
    decision: Decision


@factory
def decided(strategy: Strategy, vote: Vote) -> Strategy:
    """Applies a sync only when a worker's own data ask for it.

    At every step each worker votes, and one number is all-reduced. If any worker asks
    for a sync, all workers sync, so none waits for the others; otherwise nothing more
    is sent. Put `every` around it: `every(decided(…), 16)` votes after every 16 local
    steps.

    Args:
        strategy: the strategy to apply; it must sync, and not reduce gradients.
        vote: (replica, state, step) -> whether this worker asks for a sync: a scalar
            boolean, which may differ between workers. `state` is the strategy's state.
            If the vote reads `replica.loss`, the strategy must declare `sees_loss`.

    Returns:
        A Strategy. State: the strategy's, and the step of the last decision.
        `DataParallel.run` reports for each step whether the workers decided to sync, as
        metrics["decided"]; `communication` counts the bytes from these decisions.

    Raises:
        ValueError: the vote is not a function, or the strategy is not a Strategy,
            reduces gradients, never syncs, or acts at every step (`delayed`, `paced`,
            `async_diloco`).

    Example:
        >>> import numpy as np
        >>> from syncalgos import average, communication, decided
        >>> far = lambda replica, state, step: abs(replica.params).max() > 1
        >>> strategy = decided(average(), far)
        >>> taken = np.array([[False], [True]])  # of a run, metrics["decided"]
        >>> model = np.ones(10, np.float32)
        >>> sent = communication(strategy, model, workers=2, steps=2, taken=taken)
        >>> sent.per_step  # a vote at each step, then a vote and an average
        array([ 4., 48.])
    """
    check_strategy("decided", strategy)
    if not callable(vote):
        raise ValueError(f"decided: vote must be a function, got {checks.shown(vote)}")
    rules.check("decided", strategy)
    return _decided(strategy, vote, Strategy())


def _decided(strategy: Strategy, vote: Vote, then: Strategy) -> Strategy:
    """`decided`, with a strategy `then` that is applied after it at the same steps."""
    axis = introspection.axis_of(strategy)

    def init(params):
        none = Decision(jnp.int32(-1))
        return DecidedState(strategy.init(params), then.init(params), none)

    def act(replica, state, step):
        replica, own = apply_sync(strategy, replica, state.strategy, step)
        replica, behind = apply_sync(then, replica, state.then, step)
        return replica, DecidedState(own, behind, state.decision)

    def sync(replica, state, step):
        asks = jnp.asarray(vote(replica, state.strategy, step), jnp.float32)
        # A branch on a value that differs between workers would let some wait forever,
        # and under vmap compute both arms. Sums of ones are exact in any order, so all
        # devices decide alike, and vmap sees that the result is not mapped.
        # Any worker can ask, as in Kamp's protocol. For a criterion over all workers,
        # such as a mean distance, `vote` all-reduces its own number: 4 bytes more.
        asked, last = collectives.mean(asks, axis) > 0, state.decision.at
        now = _as_counted(asked, last == step)
        replica, state = lax.cond(
            now, lambda: act(replica, state, step), lambda: (replica, state)
        )
        decision = Decision(jnp.where(now, step, last).astype(last.dtype))
        return replica, state._replace(decision=decision)

    # A whole without members, as the vote reads the state of the strategy inside.
    described = introspection.Combination(
        sync,
        landing=introspection.landing_steps(strategy),
        follow=lambda extra: _decided(strategy, vote, chain(then, extra)),
    )
    return strategy._replace(
        init=init,
        reduce=introspection.inner_reduce(strategy),
        sync=described,
        center=introspection.inner_center(strategy),
        acts=None,
        sees_loss=strategy.sees_loss or then.sees_loss,
    )


BY_DATA = Primitive("decided_by_data")
"""Marks a vote, with its recorded decision, in the program that the ledger walks."""
BY_DATA.def_abstract_eval(lambda vote, recorded: vote)


def _as_counted(vote: jax.Array, recorded: jax.Array) -> jax.Array:
    """Returns the vote; the ledger, which cannot know it, takes the recorded one."""
    # Programs that run hold no mark: it has no rule for several lanes or for compilers.
    return BY_DATA.bind(vote, recorded) if COUNTED.get() else vote


def found(state: PyTree) -> dict[int, Decision]:
    """Returns the decisions in a strategy's state, by the numbers of their leaves."""
    leaves = jax.tree.leaves(state, is_leaf=_is_one)  # a decision has a single leaf
    return {i: x for i, x in enumerate(leaves) if _is_one(x)}


def put(state: PyTree, decisions: Iterable[Decision]) -> PyTree:
    """Replaces the decisions in a state, in the order of its leaves."""
    rest = iter(decisions)
    return jax.tree.map(
        lambda x: next(rest) if _is_one(x) else x, state, is_leaf=_is_one
    )


def noted(state: PyTree, step: Any) -> dict[str, jax.Array]:
    """Returns the decisions of a step, as metrics.

    Args:
        state: a strategy's state; leaves may have a first axis of identical lanes.
        step: the local step.

    Returns:
        {"decided": whether each decision was to act, (decisions,) booleans}; {} for a
        strategy without decisions.
    """
    # A flag in the state would be wrong: `when` keeps the state at steps that it skips,
    # so the flag would belong to an earlier step.
    acts = [jnp.ravel(decision.at)[0] == step for decision in found(state).values()]
    return {METRIC: jnp.stack(acts)} if acts else {}


def _is_one(x: Any) -> bool:
    """Whether a node of a state is a decision."""
    return isinstance(x, Decision)
