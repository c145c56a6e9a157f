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
from syncalgos.collectives._axes import COUNTED, same_on_all
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
    rules.check_combination("decided", strategy)
    return _decided(strategy, vote, Strategy())


def _decided(strategy: Strategy, vote: Vote, follower: Strategy) -> Strategy:
    """`decided`, with a `follower` that is applied after it at the same steps."""
    axis = introspection.find_axis(strategy)

    def init(params: PyTree) -> DecidedState:
        no_decision = Decision(jnp.int32(-1))
        return DecidedState(strategy.init(params), follower.init(params), no_decision)

    def act(
        replica: Replica, state: DecidedState, step: Any
    ) -> tuple[Replica, DecidedState]:
        replica, strategy_state = apply_sync(strategy, replica, state.strategy, step)
        replica, follower_state = apply_sync(follower, replica, state.then, step)
        return replica, DecidedState(strategy_state, follower_state, state.decision)

    def sync(
        replica: Replica, state: DecidedState, step: Any
    ) -> tuple[Replica, DecidedState]:
        step = same_on_all(step, axis)
        own_vote = jnp.asarray(vote(replica, state.strategy, step), jnp.float32)
        if own_vote.shape:
            raise ValueError(
                "decided: vote must return a boolean, got an array of shape "
                f"{own_vote.shape}: reduce it, as by jnp.any"
            )
        # A branch on a value that differs between workers would let some wait forever,
        # and under vmap compute both arms. Sums of ones are exact in any order, so all
        # devices decide alike, and vmap sees that the result is not mapped.
        # Any worker can ask, as in Kamp's protocol. For a criterion over all workers,
        # such as a mean distance, `vote` all-reduces its own number: 4 bytes more.
        is_asked = collectives.mean(own_vote, axis) > 0
        last_step = state.decision.at
        must_act = _replace_if_counted(is_asked, last_step == step)
        replica, state = lax.cond(
            must_act, lambda: act(replica, state, step), lambda: (replica, state)
        )
        new_step = jnp.where(must_act, step, last_step).astype(last_step.dtype)
        return replica, state._replace(decision=Decision(new_step))

    # Without members, as the vote reads the state of the strategy inside.
    combination = introspection.Combination(
        sync,
        landing=introspection.landing_steps(strategy),
        follow=lambda extra: _decided(strategy, vote, chain(follower, extra)),
    )
    return strategy._replace(
        init=init,
        reduce=introspection.inner_reduce(strategy),
        sync=combination,
        center=introspection.inner_center(strategy),
        acts=None,
        sees_loss=strategy.sees_loss or follower.sees_loss,
    )


BY_DATA = Primitive("decided_by_data")
"""Marks a vote, with its recorded decision, in the program that the ledger walks."""
BY_DATA.def_abstract_eval(lambda vote, recorded: vote)


def _replace_if_counted(vote: jax.Array, recorded: jax.Array) -> jax.Array:
    """Returns the vote; the ledger, which cannot know it, takes the recorded one."""
    # Programs that run hold no mark: it has no rule for several lanes or for compilers.
    return BY_DATA.bind(vote, recorded) if COUNTED.get() else vote


def find_decisions(state: PyTree) -> dict[int, Decision]:
    """Returns the decisions in a strategy's state, by the numbers of their leaves."""
    leaves = jax.tree.leaves(
        state, is_leaf=_is_decision
    )  # a decision has a single leaf
    return {i: x for i, x in enumerate(leaves) if _is_decision(x)}


def put_decisions(state: PyTree, decisions: Iterable[Decision]) -> PyTree:
    """Replaces the decisions in a state, in the order of its leaves."""
    new_decisions = iter(decisions)

    def replace_decision(x: Any) -> Any:
        return next(new_decisions) if _is_decision(x) else x

    return jax.tree.map(replace_decision, state, is_leaf=_is_decision)


def report_decisions(state: PyTree, step: Any) -> dict[str, jax.Array]:
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
    acts = [
        jnp.ravel(decision.at)[0] == step for decision in find_decisions(state).values()
    ]
    return {METRIC: jnp.stack(acts)} if acts else {}


def _is_decision(x: Any) -> bool:
    """Whether a node of a state is a decision."""
    return isinstance(x, Decision)
