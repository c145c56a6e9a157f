"""What combinators know of a strategy: when it acts, and what it was made of.

The steps at which a sync acts are declared by `Strategy.acts`, which everybody may
give. `Combination` is the combinators' own: it says what is inside a strategy, so that
a delay, a weight or a condition can go to the members of a chain. Defaults and declared
forms are recognised here alone: no other file compares functions or asks for types.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from syncalgos.collectives import PyTree
from syncalgos.strategy import MeanCenter, MeanOfGrads, Replica, Strategy, apply_reduce
from syncalgos.strategy import keep_grads as keep_grads
from syncalgos.strategy import keep_replica as keep_replica

Change = Callable[[Strategy], Strategy]
Steps = Callable[[Any], Any]
"""Local step -> a scalar boolean, the same on all workers."""


class Combination(NamedTuple):
    """A sync that a combinator made, and what it was made of.

    It is the sync and no field of the Strategy, so that a sync in its place, by
    `_replace(sync=…)`, takes the description of the old one with it.

    Attributes:
        call: the function itself.
        members: the strategies inside; () for a whole that nobody may change.
        rebuild: f -> the same combinator, around f(member) for each of its members.
        lands: step -> whether the replica takes on a result then; None: whenever a
            member's does, and without members whenever it acts.
        condition: of `when`, the steps at which it passes the call on.
        clocked: whether it works at every local step (a delay, a moving average), so
            that `when` belongs inside of it.
        delays: whether results land later than they are sent.
        behind: of `decided`, extra -> the same with another strategy applied behind it
            where it is decided to act. None where the step alone says when it acts.
    """

    call: Callable[[Any, PyTree, Any], tuple[Any, PyTree]]
    members: tuple[Strategy, ...] = ()
    rebuild: Callable[[Change], Strategy] | None = None
    lands: Steps | None = None
    condition: Steps | None = None
    clocked: bool = False
    delays: bool = False
    behind: Callable[[Strategy], Strategy] | None = None

    def __call__(
        self, replica: Replica, state: PyTree, step: Any
    ) -> tuple[Any, PyTree]:
        return self.call(replica, state, step)


def combination(strategy: Strategy) -> Combination:
    """What the strategy was made of; of any function, a whole."""
    sync = strategy.sync
    return sync if isinstance(sync, Combination) else Combination(sync)


def rebuilt(strategy: Strategy, change: Change) -> Strategy:
    """The same combinators around changed members; a whole is changed itself."""
    rebuild = combination(strategy).rebuild
    return change(strategy) if rebuild is None else rebuild(change)


def innermost(change: Change, strategy: Strategy) -> Strategy:
    """Changes the strategies that combinators were given, below when, chain and all."""
    if combination(strategy).members:
        change = functools.partial(innermost, change)
    return rebuilt(strategy, change)


def never(step: Any) -> bool:
    return False


def acting_steps(strategy: Strategy) -> Steps | None:
    """The steps at which a sync may do anything; None: at every one."""
    return never if strategy.sync is keep_replica else strategy.acts


def at_any(*steps: Steps | None) -> Steps | None:
    """The steps of any of these; None stands for every step."""
    known = [each for each in steps if each is not None]
    if len(known) < len(steps):
        return None
    if all(each is never for each in known):
        return never
    return lambda step: functools.reduce(jnp.logical_or, [f(step) for f in known])


def at_both(condition: Steps, steps: Steps | None) -> Steps:
    """The steps of `steps` at which a condition holds; None stands for every step."""
    if steps is None or steps is never:
        return condition if steps is None else never
    return lambda step: jnp.logical_and(condition(step), steps(step))


def acts(strategy: Strategy, step: Any) -> Any:
    """Whether a sync may do anything at this step, to the replica or to its state."""
    steps = acting_steps(strategy)
    return True if steps is None else steps(step)


def ever_acts(strategy: Strategy) -> bool:
    """Whether there is, by its declaration, any step at which a sync does anything."""
    return acting_steps(strategy) is not never


def rests(strategy: Strategy) -> bool:
    """Whether there are, by its declaration, steps at which a sync does nothing."""
    return acting_steps(strategy) is not None


def lands(strategy: Strategy, step: Any) -> Any:
    """Whether a sync of this strategy changes the replica at this step."""
    made = combination(strategy)
    if made.lands is not None:
        return made.lands(step)
    if not made.members:
        return acts(strategy, step)
    each = [lands(member, step) for member in made.members]
    landed = functools.reduce(jnp.logical_or, each)
    if made.condition is None:
        return landed
    return jnp.logical_and(made.condition(step), landed)


def ever_syncs(strategy: Strategy) -> bool:
    """Whether it changes replicas at any step, and not gradients alone."""
    made = combination(strategy)
    if made.members:
        return any(map(ever_syncs, made.members))
    return made.call is not keep_replica


def is_clocked(strategy: Strategy) -> bool:
    """Whether a combinator that works at every local step is in this strategy."""
    made = combination(strategy)
    return made.clocked or any(map(is_clocked, made.members))


def decides(strategy: Strategy) -> bool:
    """Whether the workers' data have a say in when it acts: see `decided`."""
    made = combination(strategy)
    return made.behind is not None or any(map(decides, made.members))


def check_undecided(where: str, strategy: Strategy) -> None:
    """Refuses a strategy whose data decide on when it acts.

    Raises:
        ValueError: such a strategy.
    """
    if decides(strategy):
        raise ValueError(
            f"{where}: the data decide on when this strategy syncs (see `decided`): "
            "that must follow from the step alone here"
        )


def reduces(strategy: Strategy) -> bool:
    """Whether the strategy may change gradients."""
    return strategy.reduce is not keep_grads


def takes_mean(strategy: Strategy) -> bool:
    """Whether the gradients become their plain mean over all workers."""
    return isinstance(strategy.reduce, MeanOfGrads)


def has_center(strategy: Strategy) -> bool:
    """Whether the strategy has a center of its own, for some leaves at least."""
    center = strategy.center
    return not isinstance(center, MeanCenter) or center.over is not None


def has_whole_center(strategy: Strategy) -> bool:
    """Whether the strategy has a center of its own for all leaves."""
    return not isinstance(strategy.center, MeanCenter)


def center_over(
    strategy: Strategy, rest: PyTree, params: PyTree, state: PyTree
) -> PyTree:
    """Returns `rest`, its leaves replaced by the strategy's center where it has one."""
    center = strategy.center
    if not isinstance(center, MeanCenter):
        return center(params, state)
    return rest if center.over is None else center.over(rest, params, state)


def inner_center(strategy: Strategy) -> Callable[[PyTree, PyTree], PyTree]:
    """The strategy's center, of a state that holds the strategy's as `.strategy`."""

    def over(rest, params, state):
        return center_over(strategy, rest, params, state.strategy)

    if has_whole_center(strategy):
        return functools.partial(over, None)
    center = strategy.center
    # A mean stays a mean: others see by it that there is no center of its own.
    return center._replace(over=over) if has_center(strategy) else center


def inner_reduce(
    strategy: Strategy,
) -> Callable[[PyTree, Replica, PyTree, Any], tuple[Any, Any]]:
    """The strategy's reduce, of a state that holds the strategy's as `.strategy`."""
    if not reduces(strategy):
        return keep_grads

    def reduce(grads, replica, state, step):
        grads, inner = apply_reduce(strategy, grads, replica, state.strategy, step)
        return grads, state._replace(strategy=inner)

    # Still declared: lanes of a device may be joined around it as before.
    return MeanOfGrads(reduce) if takes_mean(strategy) else reduce
