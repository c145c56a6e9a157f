"""Questions about a strategy: when it acts, and what it was made of.

The steps at which a sync acts are declared by `Strategy.acts`, which every user may
give. `Combination` is private to the combinators: it lists what is inside a strategy,
so that a delay, a weight or a condition can go to the members of a chain. Defaults and
declared forms are recognised here alone.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.strategy import MeanCenter, MeanOfGrads, Replica, Strategy, apply_reduce
from syncalgos.strategy import keep_grads as keep_grads
from syncalgos.strategy import keep_replica as keep_replica

Change = Callable[[Strategy], Strategy]
Steps = Callable[[Any], Any]
"""Local step -> a scalar boolean, the same on all workers."""


class Rounds(NamedTuple):
    """The weights of workers, round by round; see `participating`.

    Attributes:
        schedule: (step, workers) -> weights, (workers,), at the end of a round.
        lands: step -> whether it ends a round; None: every step is one.
    """

    schedule: Callable[[Any, int], Any]
    lands: Steps | None


class Combination(NamedTuple):
    """A sync that a combinator made, and what it was made of.

    Attributes:
        call: (replica, state, step) -> (replica, state), the sync itself.
        members: the strategies inside; () for a whole that others must not change.
        rebuild: f -> the same combinator around f(member), for each of its members.
        lands: step -> whether the replica takes on a result then; None: whenever a
            member's does, or without members whenever it acts.
        condition: step -> whether `when` calls its member then; else None.
        clocked: whether it works at every local step, as a delay and a moving average
            do, so that `when` belongs inside.
        delays: whether results land later than they are sent.
        steady: whether the sync must be called at every local step, so that `when`
            refuses it; a phase, `until` or `after`, may lie around it.
        behind: extra -> the same strategy with another behind it, wherever the data
            decide to act; None where the step alone decides.
        rounds: by the product of whose weights the workers count in what the strategy
            combines; none of them: all alike.
    """

    # It is the sync, and not a field beside it: `_replace(sync=…)` then replaces the
    # description together with the function that it describes.
    call: Callable[[Any, PyTree, Any], tuple[Any, PyTree]]
    members: tuple[Strategy, ...] = ()
    rebuild: Callable[[Change], Strategy] | None = None
    lands: Steps | None = None
    condition: Steps | None = None
    clocked: bool = False
    delays: bool = False
    steady: bool = False
    behind: Callable[[Strategy], Strategy] | None = None
    rounds: tuple[Rounds, ...] = ()

    def __call__(
        self, replica: Replica, state: PyTree, step: Any
    ) -> tuple[Any, PyTree]:
        return self.call(replica, state, step)


def combination(strategy: Strategy) -> Combination:
    """The structure of a strategy; a sync that no combinator made is a whole."""
    sync = strategy.sync
    return sync if isinstance(sync, Combination) else Combination(sync)


def inside(strategy: Strategy) -> Iterator[Combination]:
    """The structure of a strategy, and of all that are inside."""
    made = combination(strategy)
    yield made
    for member in made.members:
        yield from inside(member)


def rebuilt(strategy: Strategy, change: Change) -> Strategy:
    """Changes the members of a strategy, or the strategy itself if it is a whole."""
    rebuild = combination(strategy).rebuild
    return change(strategy) if rebuild is None else rebuild(change)


def innermost(change: Change, strategy: Strategy) -> Strategy:
    """Changes the wholes inside a strategy, below all combinators."""
    if combination(strategy).members:
        change = functools.partial(innermost, change)
    return rebuilt(strategy, change)


def under_gates(strategy: Strategy) -> tuple[list[Steps], Strategy]:
    """The conditions of `when` around a strategy, outermost first, and itself."""
    gates = []
    while (made := combination(strategy)).condition is not None:
        gates.append(made.condition)
        [strategy] = made.members
    return gates, strategy


def never(step: Any) -> bool:
    """The steps of a sync that does nothing."""
    return False


def acting_steps(strategy: Strategy) -> Steps | None:
    """The steps at which a sync may do anything; None stands for every step."""
    return never if strategy.sync is keep_replica else strategy.acts


def at_any(*steps: Steps | None) -> Steps | None:
    """The union of sets of steps; None stands for every step."""
    # Nothing is declared where one of them may act at every step: so the engine need
    # not look for rounds, which would all be a step long.
    known = [each for each in steps if each is not None]
    if len(known) < len(steps):
        return None
    if all(each is never for each in known):
        return never
    return lambda step: functools.reduce(jnp.logical_or, [f(step) for f in known])


def at_both(condition: Steps, steps: Steps | None) -> Steps:
    """The steps at which a condition holds, too; None stands for every step."""
    if steps is None or steps is never:
        return condition if steps is None else never
    return lambda step: jnp.logical_and(condition(step), steps(step))


def acts(strategy: Strategy, step: Any) -> Any:
    """Whether a sync may do anything at this step, to the replica or to its state.

    Args:
        strategy: any.
        step: the local step, an integer or an int32 scalar.

    Returns:
        A boolean, or a scalar array of one. It is True wherever nothing is declared.
    """
    steps = acting_steps(strategy)
    return True if steps is None else steps(step)


def ever_acts(strategy: Strategy) -> bool:
    """Whether a sync is declared to do anything, at any step."""
    return acting_steps(strategy) is not never


def rests(strategy: Strategy) -> bool:
    """Whether a sync is declared to do nothing, at some steps at least."""
    return acting_steps(strategy) is not None


def lands(strategy: Strategy, step: Any) -> Any:
    """Whether the replica takes on the result of a sync at this step.

    Of a delayed strategy these are the steps at which results arrive, of workers that
    do not wait those at which any of them ends a round; of others, where it acts.
    """
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
    """Whether the strategy changes replicas at any step, and not gradients alone."""
    wholes = [x for x in inside(strategy) if not x.members]
    return any(x.call is not keep_replica for x in wholes)


def rounds(strategy: Strategy) -> tuple[Rounds, ...]:
    """The weights of workers in a strategy, each schedule's once."""
    made = combination(strategy)
    inside = [each for member in made.members for each in rounds(member)]
    if made.condition is not None:  # the member knows nothing of it
        ends = functools.partial(lands, strategy)
        inside = [x if x.lands is None else x._replace(lands=ends) for x in inside]
    return tuple({each.schedule: each for each in [*made.rounds, *inside]}.values())


def is_clocked(strategy: Strategy) -> bool:
    """Whether a combinator that works at every local step is in this strategy."""
    return any(x.clocked for x in inside(strategy))


def decides(strategy: Strategy) -> bool:
    """Whether the workers' data decide on when the strategy acts; see `decided`."""
    return any(x.behind is not None for x in inside(strategy))


def check_undecided(where: str, strategy: Strategy) -> None:
    """Refuses a strategy whose data decide on when it acts.

    Raises:
        ValueError: such a strategy.
    """
    # A delay and a partial participation look up the steps that send: no data is known
    # then.
    if decides(strategy):
        raise ValueError(
            f"{where}: the data decide on when this strategy syncs (see `decided`): "
            "that must follow from the step alone here"
        )


def check_not_steady(where: str, strategy: Strategy) -> None:
    """Refuses a strategy that must act at every local step, or has one inside.

    Args:
        where: the combinator's name, for the message.
        strategy: any.

    Raises:
        ValueError: such a strategy.
    """
    if any(x.steady for x in inside(strategy)):
        raise ValueError(
            f"{where}: this strategy acts at every local step, as async_diloco does to "
            "hold slower workers back: give it a period of its own instead"
        )


def reduces(strategy: Strategy) -> bool:
    """Whether the strategy may change gradients."""
    return strategy.reduce is not keep_grads


def takes_mean(strategy: Strategy) -> bool:
    """Whether the gradients become their plain mean over all workers."""
    return isinstance(strategy.reduce, MeanOfGrads)


def mean_center(strategy: Strategy) -> MeanCenter | None:
    """The strategy's center, if that is the mean of the replicas for some leaves."""
    return strategy.center if isinstance(strategy.center, MeanCenter) else None


def axis_of(*strategies: Strategy) -> Axis:
    """The axis or axes of strategies: the last that are not WORKERS, if any are."""
    for strategy in reversed(strategies):
        mean = mean_center(strategy)
        axis = strategy.axis or (mean.axis if mean else WORKERS)
        if axis != WORKERS:
            return axis
    return WORKERS


def has_center(strategy: Strategy) -> bool:
    """Whether the strategy has a center of its own, for some leaves at least."""
    mean = mean_center(strategy)
    return mean is None or mean.over is not None


def center_over(
    strategy: Strategy, rest: PyTree, params: PyTree, state: PyTree
) -> PyTree:
    """Lays the strategy's center over another, on the leaves where it has one.

    Args:
        strategy: whose center is laid over.
        rest: a center, shaped like params.
        params: this worker's.
        state: the strategy's.

    Returns:
        The center, shaped like params.
    """
    mean = mean_center(strategy)
    if mean is None:
        return strategy.center(params, state)
    return rest if mean.over is None else mean.over(rest, params, state)


def inner_center(strategy: Strategy) -> Callable[[PyTree, PyTree], PyTree]:
    """The strategy's center, of a state that holds the strategy's as `.strategy`."""

    def over(rest, params, state):
        return center_over(strategy, rest, params, state.strategy)

    mean = mean_center(strategy)
    if mean is None:
        return functools.partial(over, None)
    # A mean stays a MeanCenter: that is how others see that it is only a mean.
    return mean._replace(over=over) if has_center(strategy) else mean


def inner_reduce(
    strategy: Strategy,
) -> Callable[[PyTree, Replica, PyTree, Any], tuple[Any, Any]]:
    """The strategy's reduce, of a state that holds the strategy's as `.strategy`."""
    if not reduces(strategy):
        return keep_grads

    def reduce(grads, replica, state, step):
        grads, inner = apply_reduce(strategy, grads, replica, state.strategy, step)
        return grads, state._replace(strategy=inner)

    # A reduce that was declared a mean stays one: lanes may still be merged.
    return MeanOfGrads(reduce) if takes_mean(strategy) else reduce
