"""Finds collectives that only some workers would reach, before anything is compiled.

A branch that depends on one worker's data may hold a collective. On one device it
appears to work, because both arms are computed for all lanes. Several devices would
wait for each other forever. This module follows the values that surely differ between
workers through the traced program, until a collective makes them common. In doubt, a
value counts as common, so only programs that are surely wrong are refused.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from syncalgos import collectives
from syncalgos._jaxprs import RUNS, SENDS, axes, follow, runs, within
from syncalgos.collectives import WORKERS, PyTree
from syncalgos.strategy import Replica, Strategy, apply_reduce, apply_sync


def refuse(strategy: Strategy, replica: Replica, state: PyTree, step: Any) -> None:
    """Traces a strategy's part of a local step and refuses such a branch in it.

    Args:
        strategy: the strategy to check; its `reduce` and `sync` are traced.
        replica: one worker's replica.
        state: the strategy's state of that worker.
        step: the local step, an int32 scalar.

    Raises:
        ValueError: a branch depends on values that differ between workers and holds a
            collective; or as in `apply_reduce` and `apply_sync`.
    """

    def local_step(grads, replica, state, step):
        grads, state = apply_reduce(strategy, grads, replica, state, step)
        # Stands for the inner optimizer: params differ where the gradients do.
        params = jax.tree.map(lax.add, replica.params, grads)
        return apply_sync(strategy, replica._replace(params=params), state, step)

    given = replica.params, replica, state, step
    jaxpr = jax.make_jaxpr(local_step)(*given).jaxpr
    if collectives.size() == 1:
        return
    grads, rest = len(jax.tree.leaves(replica.params)), len(jax.tree.leaves(replica))
    loss = len(jax.tree.leaves(replica.loss))  # the last of a replica
    own = [True] * grads + [False] * (rest - loss) + [True] * loss
    differs, before = [False] * len(jaxpr.outvars[rest:]), None
    while differs != before:  # until no more leaves of the state differ
        before, inputs = differs, [*own, *differs, False]
        differs = followed(jaxpr, inputs)[rest:]  # never fewer than before


def followed(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Follows the values that surely differ between workers through a program.

    Args:
        jaxpr: the jaxpr of one worker's program, such as a loss.
        inputs: whether each of its inputs differs.

    Returns:
        Whether each of its results does.

    Raises:
        ValueError: as in `refuse`.
    """
    return [*map(bool, follow(jaxpr, [*inputs], _of_equation, literals=False))]


def _of_equation(equation: Any, inputs: list[bool]) -> list[bool]:
    """Whether each result of an equation surely differs between workers."""
    name, count = equation.primitive.name, len(equation.outvars)
    if name == "axis_index":
        return [True]
    is_collective = bool(axes(equation, WORKERS))
    sent = [x.primitive.name for x, _ in within(equation) if axes(x, WORKERS)]
    if sent and name not in (SENDS if is_collective else RUNS):
        raise ValueError(
            f"how {name} sends is not known, so workers might wait for each other "
            "forever; send by syncalgos.collectives"
        )
    if is_collective:
        return [False] * count
    return _of_runs(equation, inputs, sent) if name in RUNS else [any(inputs)] * count


def _of_runs(equation: Any, inputs: list[bool], sent: list[str]) -> list[bool]:
    """Whether each result of an equation that runs jaxprs surely differs.

    Args:
        equation: the equation, of a primitive in RUNS.
        inputs: whether each operand differs.
        sent: the collectives inside.
    """
    arms, carry, _ = runs(equation, inputs)
    results = [followed(*arm) for arm in arms]
    # Whether workers take different arms, or different numbers of passes.
    choice, what = False, "branch"
    if equation.primitive.name == "cond":
        choice = inputs[0]
    elif equation.primitive.name == "while":
        (choice,), what = results.pop(0), "loop"
    if sent and choice:
        raise ValueError(
            f"a {what} that depends on one worker's data contains a collective "
            f"({sent[0]}): workers that skip it would let the others wait forever; let "
            "all workers decide together by syncalgos.decided or collectives.mean"
        )
    differs = [choice or all(x) for x in zip(*results, strict=True)]
    # A later pass takes what differs after this one, until no more does.
    carried = zip(inputs[carry], differs, strict=False)
    later = [*inputs]
    later[carry] = [before or after for before, after in carried]
    return differs if later == inputs else _of_runs(equation, later, sent)
