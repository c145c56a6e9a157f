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

    def local_step(
        grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[Replica, PyTree]:
        grads, state = apply_reduce(strategy, grads, replica, state, step)
        # Stands for the inner optimizer: params differ where the gradients do.
        params = jax.tree.map(lax.add, replica.params, grads)
        return apply_sync(strategy, replica._replace(params=params), state, step)

    jaxpr = jax.make_jaxpr(local_step)(replica.params, replica, state, step).jaxpr
    if collectives.size() == 1:
        return
    num_grads = len(jax.tree.leaves(replica.params))
    num_leaves = len(jax.tree.leaves(replica))
    num_losses = len(jax.tree.leaves(replica.loss))  # the last of a replica
    grads_differ = [True] * num_grads
    replica_differs = [False] * (num_leaves - num_losses) + [True] * num_losses
    state_differs = [False] * len(jaxpr.outvars[num_leaves:])
    previous = None
    while state_differs != previous:  # until no more leaves of the state differ
        previous = state_differs
        inputs_differ = [*grads_differ, *replica_differs, *state_differs, False]
        results_differ = follow_differing(jaxpr, inputs_differ)
        state_differs = results_differ[num_leaves:]  # never fewer than before


def follow_differing(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Follows the values that surely differ between workers through a program.

    Args:
        jaxpr: the jaxpr of one worker's program, such as a loss.
        inputs: whether each of its inputs differs.

    Returns:
        Whether each of its results does.

    Raises:
        ValueError: as in `refuse`.
    """
    return [*map(bool, follow(jaxpr, [*inputs], _follow_equation, literals=False))]


def _follow_equation(equation: Any, inputs: list[bool]) -> list[bool]:
    """Whether each result of an equation surely differs between workers."""
    name = equation.primitive.name
    num_results = len(equation.outvars)
    if name == "axis_index":
        return [True]
    is_collective = bool(axes(equation, WORKERS))
    sent_names = [x.primitive.name for x, _ in within(equation) if axes(x, WORKERS)]
    if sent_names and name not in (SENDS if is_collective else RUNS):
        raise ValueError(
            f"how {name} sends is not known, so workers might wait for each other "
            "forever; send by syncalgos.collectives"
        )
    if is_collective:
        return [False] * num_results
    if name in RUNS:
        return _follow_runs(equation, inputs, sent_names)
    return [any(inputs)] * num_results


def _follow_runs(
    equation: Any, inputs: list[bool], sent_names: list[str]
) -> list[bool]:
    """Whether each result of an equation that runs jaxprs surely differs.

    Args:
        equation: the equation, of a primitive in RUNS.
        inputs: whether each operand differs.
        sent_names: the collectives inside.
    """
    arms, carry, _ = runs(equation, inputs)
    results = [follow_differing(*arm) for arm in arms]
    # Whether workers take different arms, or different numbers of passes.
    choice_differs = False
    kind = "branch"
    if equation.primitive.name == "cond":
        choice_differs = inputs[0]
    elif equation.primitive.name == "while":
        [choice_differs] = results.pop(0)
        kind = "loop"
    if sent_names and choice_differs:
        raise ValueError(
            f"a {kind} that depends on one worker's data contains a collective "
            f"({sent_names[0]}): workers that skip it would let the others wait "
            "forever; let all workers decide together by syncalgos.decided or "
            "collectives.mean"
        )
    differs = [choice_differs or all(arms) for arms in zip(*results, strict=True)]
    # A later pass takes what differs after this one, until no more does.
    pairs = zip(inputs[carry], differs, strict=False)
    next_inputs = list(inputs)
    next_inputs[carry] = [old_flag or new_flag for old_flag, new_flag in pairs]
    if next_inputs == inputs:
        return differs
    return _follow_runs(equation, next_inputs, sent_names)
