"""Answers questions about a strategy: when it acts, and what it was made of.

`Strategy.acts` declares the steps at which a sync acts; every user may set it.
`Combination` is private to the combinators: it lists the strategies inside a strategy,
so that a delay, a weight or a condition can be applied to the members of a chain. Only
this module recognises defaults and declared forms.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.collectives._peers import Peers
from syncalgos.steps import ALWAYS, NEVER, Steps, as_steps
from syncalgos.strategy import (
    MeanCenter,
    MeanOfGrads,
    OwnGrads,
    Replica,
    Strategy,
    apply_reduce,
)
from syncalgos.strategy import keep_grads as keep_grads
from syncalgos.strategy import keep_replica as keep_replica

Change = Callable[[Strategy], Strategy]
Sync = Callable[[Replica, PyTree, Any], tuple[Any, PyTree]]


class Arrival(NamedTuple):
    """Steps at which a center changes, and which local steps it then includes.

    Attributes:
        steps: the steps after which it has changed.
        delay: local steps on the way: after step s, it includes those up to s - delay.
        rounds: earlier ones of `steps` on the way, as with `reducers.late`.
        quota: the most local steps that any worker makes in a round; None: no bound.
        ends: the steps that end these rounds.
    """

    steps: Steps
    delay: int = 0
    rounds: int = 0
    quota: int | None = None
    ends: Steps = NEVER


class Weighting(NamedTuple):
    """The weights of workers, round by round; see `participating`.

    Attributes:
        schedule: (step, workers) -> weights, (workers,), at the end of a round.
        round_ends: the steps that end a round; None: each step is a round.
        during: the steps at which the weights count.
        of_params: whether params are combined, and not opt_state or buffers alone.
        stale: whether a worker that skips keeps its model.
    """

    schedule: Callable[[Any, int], Any]
    round_ends: Steps | None
    during: Steps = ALWAYS
    of_params: bool = True
    stale: bool = False


class Gate(NamedTuple):
    """The steps at which the members are called, as with `when`.

    Attributes:
        steps: these steps.
        is_phase: whether the members do not exist at other steps, as with `until` and
            `after`.
    """

    steps: Steps
    is_phase: bool = False


class Delay(NamedTuple):
    """Results on the way, as with `delayed`.

    It works at every local step, so `when` must be applied inside it.

    Attributes:
        steps: local steps from sending to landing.
        replaces: whether nothing of the local steps since is kept.
    """

    steps: int
    replaces: bool = False


class Clock(NamedTuple):
    """What a combinator does at every local step, whatever its members do.

    Attributes:
        averages: whether it changes the center alone, as `ema` does.
        pulls: whether it moves workers between syncs, as `palsgd` does.
        quota: the most local steps that any worker makes in a round; None: no bound.
    """

    averages: bool = False
    pulls: bool = False
    quota: int | None = None

    @property
    def paces(self) -> bool:
        """Whether some workers rest, as in `paced`."""
        return not (self.averages or self.pulls)


@dataclass(frozen=True, repr=False)
class Combination:
    """A sync that tells what it was made of, and what is true of it.

    The facts are independent of each other: a strategy may have any of them.

    Attributes:
        call: (replica, state, step) -> (replica, state), the sync itself.
        members: the strategies inside; () for a leaf strategy, which combinators must
            not take apart.
        rebuild: members -> the same combinator around these.
        gate: the steps at which the members are called; None: all.
        delay: what is on the way; None: the members' results land at once.
        clock: what it does at every local step, beside its members; None: nothing.
        landing: the steps at which results land, where these are not those of the
            members or, for a leaf, of `Strategy.acts`; None: they are.
        is_steady: whether it must act at every local step, so that `when` is refused.
        weights: the weights of workers that it adds to those of its members.
        follow: for a leaf that acts when the workers' data ask for it: extra -> the
            same strategy, with `extra` applied after it whenever it acts.
        turns: for a leaf that takes turns, such as the links of a graph that changes:
            number -> the same strategy that takes its turns by number(step), and not by
            the local step.
        is_silent: whether it sends nothing, such as `reset`.
        arrives: for a leaf, when its results arrive, of the steps at which it acts.
        partial: whether other leaves of the model are not the members'.
        mixes: whether it keeps a share of what its member replaces, as `delayed` does
            without a delay.
        weigh: for a leaf that weighs params itself: the sync for params that are not
            weighted yet, in which it multiplies what it sends by the worker's share.
    """

    # This object is the sync itself, not a field beside it: `_replace(sync=…)` then
    # replaces the description together with the function that it describes.
    call: Sync
    members: tuple[Strategy, ...] = ()
    rebuild: Callable[..., Strategy] | None = None
    gate: Gate | None = None
    delay: Delay | None = None
    clock: Clock | None = None
    landing: Steps | None = None
    is_steady: bool = False
    weights: tuple[Weighting, ...] = ()
    follow: Callable[[Strategy], Strategy] | None = None
    turns: Callable[[Callable[[Any], Any]], Strategy] | None = None
    is_silent: bool = False
    arrives: tuple[Arrival, ...] = (Arrival(ALWAYS),)
    partial: bool = False
    mixes: bool = False
    weigh: Sync | None = None

    @property
    def works_at_each_step(self) -> bool:
        """Whether it acts at steps at which its members do not."""
        return self.delay is not None or self.clock is not None

    def __repr__(self) -> str:
        return "Combination(…)"

    def __call__(
        self, replica: Replica, state: PyTree, step: Any
    ) -> tuple[Any, PyTree]:
        return self.call(replica, state, step)


def combination(strategy: Strategy) -> Combination:
    """The structure of a strategy; without members for a leaf strategy."""
    sync = strategy.sync
    return sync if isinstance(sync, Combination) else Combination(sync)


def walk_strategies(strategy: Strategy) -> Iterator[Strategy]:
    """Yields a strategy, and all strategies inside it."""
    yield strategy
    for member in combination(strategy).members:
        yield from walk_strategies(member)


def leaf_strategies(strategy: Strategy) -> list[Strategy]:
    """The leaves of a strategy, which combinators must not take apart."""
    members = walk_strategies(strategy)
    return [member for member in members if not combination(member).members]


def combinations(strategy: Strategy) -> list[Combination]:
    """The structures of a strategy and of all strategies inside it."""
    return [combination(part) for part in walk_strategies(strategy)]


def rebuild_members(strategy: Strategy, change: Change) -> Strategy:
    """Changes the members of a strategy, or the strategy itself if it is a leaf."""
    structure = combination(strategy)
    if structure.rebuild is None:
        return change(strategy)
    return structure.rebuild(*map(change, structure.members))


def change_leaf_strategies(change: Change, strategy: Strategy) -> Strategy:
    """Changes the leaf strategies inside a strategy, below all its combinators."""
    if combination(strategy).members:
        change = functools.partial(change_leaf_strategies, change)
    return rebuild_members(strategy, change)


def unwrap_gates(strategy: Strategy) -> tuple[list[Steps], Strategy]:
    """The conditions of `when` around a strategy, outermost first, and the strategy."""
    gates: list[Steps] = []
    gate = combination(strategy).gate
    while gate is not None and not gate.is_phase:
        gates.append(gate.steps)
        [strategy] = combination(strategy).members
        gate = combination(strategy).gate
    return gates, strategy


def is_phase(strategy: Strategy) -> bool:
    """Whether a strategy is `until` or `after` around another one."""
    gate = combination(strategy).gate
    return gate is not None and gate.is_phase


def acting_steps(strategy: Strategy) -> Steps:
    """The steps at which a sync may do anything."""
    return NEVER if strategy.sync is keep_replica else as_steps(strategy.acts)


def acts(strategy: Strategy, step: Any) -> Any:
    """Whether a sync may do anything at this step, to the replica or to its state.

    Args:
        strategy: any strategy.
        step: the local step, an integer or an int32 scalar.

    Returns:
        A boolean, or a boolean scalar array. It is True if nothing is declared.
    """
    return acting_steps(strategy)(step)


def ever_acts(strategy: Strategy) -> bool:
    """Whether a sync is declared to do anything, at any step."""
    return acting_steps(strategy) != NEVER


def rounds_late(strategy: Strategy) -> int:
    """The number of rounds by which results are late; see `reducers.late`."""
    round_counts: list[int] = []
    for leaf in leaf_strategies(strategy):
        round_counts += [arrival.rounds for arrival in combination(leaf).arrives]
    return min(round_counts, default=0)


def rests(strategy: Strategy) -> bool:
    """Whether a sync is declared to do nothing, at some steps at least."""
    return acting_steps(strategy) != ALWAYS


def landing_steps(strategy: Strategy, voted: bool = True) -> Steps:
    """The steps at which the replica receives the result of a sync.

    For a delayed strategy these are the steps at which results arrive. For workers that
    do not wait they are the steps at which any worker ends a round, and for other
    strategies the steps at which they act. If the workers' data decide, these are the
    steps at which they may decide to, or without `voted` none.
    """
    structure = combination(strategy)
    if structure.follow is not None and not voted:
        return NEVER
    if structure.landing is not None:
        return structure.landing
    if not structure.members:
        return acting_steps(strategy)
    landing = NEVER
    for member in structure.members:
        landing |= landing_steps(member, voted)
    return landing if structure.gate is None else structure.gate.steps & landing


def lands(strategy: Strategy, step: Any, voted: bool = True) -> Any:
    """Whether the replica receives the result of a sync at this step."""
    return landing_steps(strategy, voted)(step)


def ever_syncs(strategy: Strategy) -> bool:
    """Whether the strategy ever changes replicas, and not only gradients."""
    leaves = leaf_strategies(strategy)
    return any(combination(leaf).call is not keep_replica for leaf in leaves)


def sends(strategy: Strategy) -> bool:
    """Whether the strategy may send anything."""
    return has_reduce(strategy) or any(
        combination(x).call is not keep_replica and not combination(x).is_silent
        for x in leaf_strategies(strategy)
    )


def list_weightings(strategy: Strategy) -> list[Weighting]:
    """The weights of workers in each weighted member of a strategy."""
    structure = combination(strategy)
    weightings: list[Weighting] = []
    for member in structure.members:
        weightings += list_weightings(member)
    gate = structure.gate
    if gate is not None:  # the members do not know it
        for index, weighting in enumerate(weightings):
            if weighting.round_ends:
                round_ends = gate.steps & weighting.round_ends
                weightings[index] = weighting._replace(round_ends=round_ends)
    if gate is not None and gate.is_phase:
        weightings = [x._replace(during=gate.steps & x.during) for x in weightings]
    return [*structure.weights, *weightings]


def find_weightings(
    strategy: Strategy, of_syncs: bool = False
) -> tuple[Weighting, ...]:
    """The weights of workers in a strategy, once for each schedule and phase.

    Args:
        strategy: any strategy.
        of_syncs: leave out those of which each step is a round.
    """
    weightings: dict[Any, Weighting] = {}
    for weighting in list_weightings(strategy):
        key = weighting.schedule, weighting.during
        if key in weightings:
            weighting = _join_weightings(weightings[key], weighting)
        if weighting.round_ends or not of_syncs:
            weightings[key] = weighting
    return tuple(weightings.values())


def _join_weightings(earlier: Weighting, later: Weighting) -> Weighting:
    """The rounds of two members that have the same weights."""
    if earlier.of_params != later.of_params:  # the model's rounds are those of params
        return earlier if earlier.of_params else later
    if earlier.round_ends and later.round_ends:  # a round ends when any member's does
        return later._replace(round_ends=earlier.round_ends | later.round_ends)
    return later._replace(round_ends=None)


def has_reduce(strategy: Strategy) -> bool:
    """Whether the strategy's reduce must be called, as it does more than nothing."""
    return strategy.reduce is not keep_grads


def reduces(strategy: Strategy) -> bool:
    """Whether a worker's gradients may reach other workers by the strategy's reduce."""
    return has_reduce(strategy) and not isinstance(strategy.reduce, OwnGrads)


Reduce = Callable[[PyTree, Replica, PyTree, Any], tuple[Any, Any]]


def reduce_like(reduce: Reduce, *strategies: Strategy) -> Reduce:
    """Declares a reduce that calls those of some strategies to be what they are."""
    if any(map(reduces, strategies)):
        return reduce
    return OwnGrads(reduce) if any(map(has_reduce, strategies)) else keep_grads


def takes_mean(strategy: Strategy) -> bool:
    """Whether the strategy replaces gradients by their plain mean over all workers."""
    return isinstance(strategy.reduce, MeanOfGrads)


def mean_center(strategy: Strategy) -> MeanCenter | None:
    """The strategy's center, if it is the mean of replicas for some leaves at least."""
    return strategy.center if isinstance(strategy.center, MeanCenter) else None


def find_axis(*strategies: Strategy) -> Axis:
    """The axis of strategies: the last one that is not WORKERS, else WORKERS."""
    for strategy in reversed(strategies):
        mean = mean_center(strategy)
        axis = strategy.axis or (mean.axis if mean else WORKERS)
        if axis != WORKERS:
            return axis
    return WORKERS


def check_mapped(where: str, strategy: Strategy) -> None:
    """Refuses a strategy whose workers are processes that a transport joins.

    Args:
        where: the function that maps the strategy's axis itself, for the message.
        strategy: the strategy.

    Raises:
        ValueError: the strategy's axis is Peers.
    """
    axis = find_axis(strategy)
    if isinstance(axis, Peers):
        raise ValueError(
            f"{where}: maps the strategy's axis itself, but the workers of this "
            f"strategy are processes, axis={axis}: leave out axis=, or call the "
            "strategy's functions in a step of your own"
        )


def has_center(strategy: Strategy) -> bool:
    """Whether the strategy has its own center, for some leaves at least."""
    mean = mean_center(strategy)
    return mean is None or mean.over is not None


def center_over(
    strategy: Strategy, default_center: PyTree, params: PyTree, state: PyTree
) -> PyTree:
    """Replaces a center by the strategy's, on the leaves for which it has its own.

    Args:
        strategy: the strategy.
        default_center: a center for the other leaves, shaped like params.
        params: this worker's params.
        state: the strategy's state.

    Returns:
        The center, shaped like params.
    """
    mean = mean_center(strategy)
    if mean is None:
        return strategy.center(params, state)
    return (
        default_center
        if mean.over is None
        else mean.over(default_center, params, state)
    )


def inner_center(strategy: Strategy) -> Callable[[PyTree, PyTree], PyTree]:
    """The strategy's center, for a state that holds the strategy's as `.strategy`."""

    def over(default_center: PyTree, params: PyTree, state: PyTree) -> PyTree:
        return center_over(strategy, default_center, params, state.strategy)

    mean = mean_center(strategy)
    if mean is None:
        return functools.partial(over, None)
    # A mean stays a MeanCenter, by which combinators recognise it.
    return replace(mean, over=over) if has_center(strategy) else mean


def inner_reduce(strategy: Strategy) -> Reduce:
    """The strategy's reduce, for a state that holds the strategy's as `.strategy`."""

    def reduce(
        grads: PyTree, replica: Replica, state: Any, step: Any
    ) -> tuple[PyTree, PyTree]:
        grads, inner_state = apply_reduce(
            strategy, grads, replica, state.strategy, step
        )
        return grads, state._replace(strategy=inner_state)

    # A reduce that was declared a mean stays one, so that lanes may be merged.
    if takes_mean(strategy):
        return MeanOfGrads(reduce)
    return reduce_like(reduce, strategy)
