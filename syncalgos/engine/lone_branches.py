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
from syncalgos.collectives import PyTree
from syncalgos.jaxprs import axes, follow, inner, within
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
        differs = _results(jaxpr, inputs)[rest:]  # never fewer than before


def refuse_in_loss(jaxpr: Any, inputs: Sequence[bool]) -> None:
    """Refuses a branch in a loss if only some workers would reach its collective.

    Args:
        jaxpr: the jaxpr of one worker's loss.
        inputs: whether each of its inputs surely differs between workers.

    Raises:
        ValueError: as in `refuse`.
    """
    _results(jaxpr, inputs)


def _results(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Whether each result surely differs between workers, given which inputs do."""
    return [*map(bool, follow(jaxpr, [*inputs], _of_equation, literals=False))]


def _of_equation(equation: Any, inputs: list[bool]) -> list[bool]:
    """Whether each result of an equation surely differs between workers."""
    name, count = equation.primitive.name, len(equation.outvars)
    if name == "axis_index":
        return [True]
    if axes(equation):
        return [False] * count
    held = inner(equation)
    sent = [x.primitive.name for x, _ in within(equation) if axes(x)]
    if sent and _parts_ways(equation, inputs):
        what = "loop" if name == "while" else "branch"
        raise ValueError(
            f"a {what} that depends on one worker's data contains a collective "
            f"({sent[0]}): workers that skip it would let the others wait forever; let "
            "all workers decide together by syncalgos.decided or collectives.mean"
        )
    if name == "cond":
        arms = [_results(arm, inputs[1:]) for arm in held]
        return [inputs[0] or all(arm) for arm in zip(*arms, strict=True)]
    if len(held) == 1 and len(held[0].in_avals) == len(inputs):  # jit, scan, remat, …
        return _results(held[0], inputs)
    return [any(inputs) and not sent] * count


def _parts_ways(equation: Any, inputs: list[bool]) -> bool:
    """Whether workers surely take different arms, or different numbers of passes."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        consts, body = params["cond_nconsts"], params["body_nconsts"]
        carry = inputs[consts + body :]
        return _results(params["cond_jaxpr"], inputs[:consts] + carry)[0]
    return name == "cond" and inputs[0]
