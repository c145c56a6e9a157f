"""Strategies that take turns, such as the links of a graph that changes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from syncalgos._combinators import rules
from syncalgos._combinators.introspection import Combination, reduce_like
from syncalgos.collectives._graphs import changes
from syncalgos.strategy import PyTree, Replica, Strategy


def in_turns(graph: Any, strategy: Strategy) -> Strategy:
    """Declares that a strategy takes turns, if its graph changes.

    Args:
        graph: the graph, as `topology.check` returned it.
        strategy: a strategy that needs the step for its graph alone.
    """
    if not changes(graph):
        return strategy

    def turns(number: Callable[[Any], Any]) -> Strategy:
        def reduce(
            grads: PyTree, replica: Replica, state: PyTree, step: Any
        ) -> tuple[PyTree, PyTree]:
            return strategy.reduce(grads, replica, state, number(step))

        def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
            return strategy.sync(replica, state, number(step))

        return strategy._replace(reduce=reduce_like(reduce, strategy), sync=sync)

    return strategy._replace(sync=Combination(strategy.sync, turns=turns))


class CountedTurns(NamedTuple):
    """A function that refuses to count turns once more; see `Combination.turns`.

    Attributes:
        period: the period whose syncs are counted; None: the strategy counts itself.
    """

    period: int | None = None

    def __call__(self, number: Callable[[Any], Any]) -> Strategy:
        raise rules.make_error("every", "counted turns")
