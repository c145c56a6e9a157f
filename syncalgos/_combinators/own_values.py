"""What a result holds of a worker's own values, beside what the workers sent.

A weight multiplies what a worker sends, so that the mean over all is a weighted mean.
What a worker keeps for itself must not be multiplied.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import _jaxprs
from syncalgos.collectives import Axis, PyTree
from syncalgos.collectives._axes import trace_over

FROM_OWN_VALUE = "own"
"""Stands for a value that depends on own values by a way on which nothing is sent."""


class Traced(NamedTuple):
    """What a function makes of a tree.

    Attributes:
        sends: whether the function sends anything.
        is_same: for each leaf of the result, whether it is the leaf that was given.
        is_own: for each other leaf, whether it depends on what was given beside what
            the workers sent. Only floats that are not empty count: no others have a
            mean.
    """

    sends: bool
    is_same: list[bool]
    is_own: list[bool]

    @property
    def mixes(self) -> bool:
        """Whether own values are mixed with what the workers sent."""
        return self.sends and any(self.is_own)


def trace(function: Callable[[PyTree], PyTree], tree: PyTree, axis: Axis) -> Traced:
    """Traces a function, and tells what its result holds of what it was given.

    Args:
        function: a tree -> a tree of the same structure, shapes and dtypes.
        tree: arrays.
        axis: the mapped axis or axes over which the workers lie.
    """
    jaxpr, names = trace_over(function, tree, axis)

    def is_sent(equation: Any) -> bool:
        shared_names = names & {*_jaxprs.axes(equation)}
        return equation.primitive.name in _jaxprs.SENDS and bool(shared_names)

    leaf_numbers = [*range(len(jaxpr.jaxpr.invars))]
    results = _jaxprs.follow(jaxpr, leaf_numbers, _visitor(is_sent), literals=False)
    leaves = jax.tree.leaves(tree)
    is_same = []
    is_own = []
    for number, result, leaf in zip(leaf_numbers, results, leaves, strict=True):
        is_unchanged = result == number
        is_same.append(is_unchanged)
        is_own.append(result is not None and not is_unchanged and _has_mean(leaf))
    sends = any(is_sent(x) for x, _ in _jaxprs.equations(jaxpr.jaxpr))
    return Traced(sends, is_same, is_own)


def keep(is_same: list[bool], own_tree: PyTree, result: PyTree) -> PyTree:
    """Replaces the leaves that a function returned as they were by the worker's own.

    Args:
        is_same: whether each leaf is one of these.
        own_tree: the leaves that were not multiplied by a weight.
        result: a tree of the same structure.
    """
    result_leaves, structure = jax.tree.flatten(result)
    triples = zip(is_same, jax.tree.leaves(own_tree), result_leaves, strict=True)
    leaves = []
    for is_unchanged, own_leaf, result_leaf in triples:
        leaves.append(own_leaf if is_unchanged else result_leaf)
    return structure.unflatten(leaves)


def _has_mean(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and jnp.size(leaf) > 0


def _visitor(is_sent: Callable[[Any], bool]) -> Callable[[Any, list[Any]], list[Any]]:
    """Makes the rule by which values pass an equation.

    A value is the number of a leaf that was given; FROM_OWN_VALUE, if it was computed
    from some; or None, if it depends on none, or only on what was sent.
    """

    def visit(equation: Any, values: list[Any]) -> list[Any]:
        name = equation.primitive.name
        num_results = len(equation.outvars)
        if is_sent(equation) or all(value is None for value in values):
            return [None] * num_results
        if name == "optimization_barrier":
            return values
        runs = _jaxprs.runs(equation, values)
        if not runs.arms:
            return [FROM_OWN_VALUE] * num_results
        if name == "scan":
            return _follow_passes(*runs.arms[0], runs.carry, visit, bool(runs.passes))
        if name == "while":
            carry = slice(equation.params["body_nconsts"], None)
            return _follow_passes(*runs.arms[1], carry, visit, has_pass=False)
        if name == "cond" and values[0] is not None:  # own values choose the arm
            return [FROM_OWN_VALUE] * num_results
        results = [_jaxprs.follow(*arm, visit, literals=False) for arm in runs.arms]
        return [_join(list(arms)) for arms in zip(*results, strict=True)]

    return visit


def _join(values: list[Any]) -> Any:
    """What is known of a value that is one of several."""
    return values[0] if all(value == values[0] for value in values) else FROM_OWN_VALUE


def _follow_passes(
    jaxpr: Any, values: list[Any], carry: slice, visit: Callable, has_pass: bool
) -> list[Any]:
    """Follows values through passes of a jaxpr, whose results begin with the carry.

    Args:
        jaxpr: what each pass runs.
        values: those of the inputs in the first pass.
        carry: the place among the inputs of what passes hand on.
        visit: the rule by which values pass an equation.
        has_pass: whether there is a pass at all.
    """
    values = list(values)
    while True:
        results = _jaxprs.follow(jaxpr, values, visit, literals=False)
        carried = values[carry]
        handed_on = results[: len(carried)]
        joined = [_join(list(pair)) for pair in zip(carried, handed_on, strict=True)]
        if joined == carried:
            # The rows of the last results are stacked: they are no leaf as it was.
            stacked = results[len(carried) :]
            rows = [None if row is None else FROM_OWN_VALUE for row in stacked]
            return (handed_on if has_pass else joined) + rows
        values[carry] = joined
