"""Looking into combined strategies: what is inside, and when it acts."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from syncalgos.collectives import PyTree
from syncalgos.strategy import keep_grads as keep_grads
from syncalgos.strategy import keep_replica as keep_replica

# From one strategy to another; typed in syncalgos.strategy, which builds on this.
Change = Callable[[Any], Any]


def _at_every_step(step: Any) -> Any:
    return True


class Composed(NamedTuple):
    """A sync that a combinator made: other combinators can look into it.

    Attributes:
        call: the function itself.
        members: the strategies inside; of one that only says when it acts, none.
        rebuild: f -> the same combinator, around f(member) for each of its members.
        lands: step -> whether what it does to the replica takes effect at this step.
        acts: step -> whether it may do anything at all; elsewhere it hands on what it
            was given.
        gate: (active, strategy) of `when`.
        always: it acts at every step, so that `when` belongs inside it.
        behind: of `decided`, extra -> the same, with another strategy applied behind it
            where it is decided to act. None where the step alone says when it acts.
    """

    call: Callable[[Any, PyTree, Any], tuple[Any, PyTree]]
    members: tuple[Any, ...]
    rebuild: Callable[[Change], Any]
    lands: Callable[[Any], Any]
    acts: Callable[[Any], Any] = _at_every_step
    gate: tuple[Callable[[Any], Any], Any] | None = None
    always: bool = False
    behind: Callable[[Any], Any] | None = None

    def __call__(self, replica: Any, state: PyTree, step: Any) -> tuple[Any, PyTree]:
        return self.call(replica, state, step)


def innermost(change: Change, strategy: Any) -> Any:
    """Changes the strategies that combinators were given, below when, chain and all."""
    if isinstance(strategy.sync, Composed) and strategy.sync.members:
        return strategy.sync.rebuild(functools.partial(innermost, change))
    return change(strategy)


def lands(strategy: Any, step: Any) -> Any:
    """Whether a sync of this strategy changes the replica at this step."""
    if isinstance(strategy.sync, Composed):
        return strategy.sync.lands(step)
    return strategy.sync is not keep_replica


def acts(strategy: Any, step: Any) -> Any:
    """Whether a sync may do anything at this step, to the replica or to its state."""
    if isinstance(strategy.sync, Composed):
        return strategy.sync.acts(step)
    return strategy.sync is not keep_replica


def rests(strategy: Any) -> bool:
    """Whether there are, by its make, steps at which a sync does nothing."""
    sync = strategy.sync
    if not isinstance(sync, Composed):
        return sync is keep_replica
    if sync.acts is _at_every_step:
        return False
    return sync.gate is not None or all(map(rests, sync.members))


def acts_always(sync: Any) -> bool:
    """Whether a combinator that acts at every step is in this sync."""
    if not isinstance(sync, Composed):
        return False
    return sync.always or any(acts_always(member.sync) for member in sync.members)


def decides(strategy: Any) -> bool:
    """Whether the workers' data have a say in when it acts: see `decided`."""
    sync = strategy.sync
    if not isinstance(sync, Composed):
        return False
    return sync.behind is not None or any(map(decides, sync.members))


def check_undecided(where: str, strategy: Any) -> None:
    """Raises a ValueError for a strategy whose data decide on when it acts."""
    if decides(strategy):
        raise ValueError(
            f"{where}: the data decide on when this strategy syncs (see `decided`): "
            "that must follow from the step alone here"
        )


def ever_syncs(strategy: Any) -> bool:
    """Whether it changes replicas at any step, and not gradients alone."""
    if isinstance(strategy.sync, Composed) and strategy.sync.members:
        return any(map(ever_syncs, strategy.sync.members))
    return strategy.sync is not keep_replica
