"""Finds out from its trace whether a loss is a mean over its batch.

Sums and means over unmasked values are not. Over the merged batches of several workers,
they differ from the mean over the workers.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from syncalgos.engine.lanes.examples import are_apart
from syncalgos.jaxprs import equations

# Equations that only call the jaxpr they hold.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"}
_CALLS |= {"custom_jvp_call"}
# The factors with which the sum of each input enters the sum of the result.
_ADDING = {"add": (1, 1), "add_any": (1, 1), "sub": (1, -1), "neg": (-1,)}
_KEEPING = {"broadcast_in_dim", "convert_element_type", "copy", "reshape"}
_ADDING |= dict.fromkeys(_KEEPING | {"squeeze", "transpose"}, (1,))


class _Node(NamedTuple):
    """An input, a constant, or the result of an equation.

    Attributes:
        name: the name of the primitive; "" for inputs and constants.
        inputs: indices of the nodes from which the node is made.
        size: the number of entries.
        varies: whether the node depends on the batch.
        known: for a constant, its value if it is one number; for an equation, all such
            values in the jaxprs that it holds.
        equation: the equation; None for inputs and constants.
    """

    name: str
    inputs: Sequence[int]
    size: int
    varies: bool
    known: tuple[float, ...] = ()
    equation: Any = None

    @property
    def is_fixed(self) -> bool:
        """Whether the node is a constant, or an input outside the batch."""
        return not (self.name or self.varies)


class _Term(NamedTuple):
    """A term of a sum: a node, its index, and its weight in the sum."""

    number: int
    node: _Node
    weight: float


def is_mean(small: Any, large: Any, batch: Sequence[bool], times: int) -> bool:
    """Whether a program returns a mean over its batch.

    It does if its result is a sum of two kinds of terms: values of examples, summed and
    divided by a known number that grows with the batch; and terms that do not depend on
    the batch. The value of an example must not depend on other examples
    (`examples.are_apart`), their number, or its position. Programs with callbacks or
    custom backward passes are refused, because these may do anything: count their
    calls, for example, or clip gradients.

    Args:
        small: the program's closed jaxpr; it returns a scalar.
        large: the closed jaxpr for a larger batch.
        batch: for each input, whether it belongs to the batch.
        times: the size of the large batch divided by that of the small one.
    """
    names = [x.primitive.name for x in equations(small.jaxpr)]
    if any(x.startswith("custom_vjp") or "callback" in x for x in names):
        return False
    few, many = _graph(small, batch), _graph(large, batch)
    terms, others = _terms(few), _terms(many)
    if [x.name for x in few] != [x.name for x in many] or len(terms) != len(others):
        return False
    changed = {i for i, x in enumerate(few) if x.known != many[i].known}
    # A constant as long as the batch depends on the examples' positions.
    changed |= {i for i, x in enumerate(few) if x.is_fixed and x.size != many[i].size}
    used = _needed(few, {x.number for x in terms})
    made = [(few[n].equation, many[n].equation) for n in sorted(used) if few[n].name]
    pairs = zip(terms, others, strict=True)
    return (
        not changed & used
        and all(_grows(*pair, times) for pair in pairs)
        and are_apart(made, times)
    )


def _needed(nodes: Sequence[_Node], needed: set[int]) -> set[int]:
    """Returns the indices of nodes and of all nodes from which they are made.

    Args:
        nodes: all nodes, in the order of the program.
        needed: indices of the nodes to start from.
    """
    for number, node in reversed([*enumerate(nodes)]):
        if number in needed:
            needed = needed.union(node.inputs)
    return needed


def has_own_derivative(closed: Any) -> bool:
    """Whether a jaxpr holds a function with a custom derivative."""
    found = equations(closed.jaxpr)
    return any(x.primitive.name == "custom_jvp_call" for x in found)


def _grows(term: _Term, other: _Term, times: int) -> bool:
    """Whether a term is part of a mean, or is the same for any batch."""
    by = times if term.node.varies else 1
    weighs = math.isclose(term.weight, by * other.weight, rel_tol=1e-5)
    same = term.node.known == other.node.known
    return weighs and same and other.node.size == by * term.node.size


def _terms(nodes: Sequence[_Node]) -> list[_Term]:
    """Decomposes the output into a weighted sum."""
    weights, found = {len(nodes) - 1: 1.0}, []
    # Backwards: a node comes after its inputs, so its weight is complete here.
    for number, node in reversed([*enumerate(nodes)]):
        if number not in weights:
            continue
        shares = _shares(node, [nodes[i] for i in node.inputs])
        if shares is None:
            found.append(_Term(number, node, weights[number]))
            continue
        pairs = zip(node.inputs, shares, strict=False)
        for i, share in [pair for pair in pairs if pair[1]]:
            weights[i] = weights.get(i, 0.0) + weights[number] * share
    return found


def _shares(node: _Node, inputs: Sequence[_Node]) -> Sequence[float] | None:
    """Returns each input's weight in an equation's result; None if it is no sum."""
    known = [x.known[0] if not x.name and x.known else None for x in inputs]
    if node.name == "reduce_sum":
        return (1,)
    if node.name == "mul" and known[0] is not None:
        factors = 0, known[0]
    elif node.name == "mul" and known[1] is not None:
        factors = known[1], 0
    elif node.name == "div" and known[1]:
        factors = 1 / known[1], 0
    elif node.name in _ADDING:
        factors = _ADDING[node.name]
    else:
        return None
    # A number that is broadcast counts once for each entry of the result.
    return [
        f * node.size / max(1, x.size) for f, x in zip(factors, inputs, strict=False)
    ]


def _graph(closed: Any, batch: Sequence[bool]) -> list[_Node]:
    """Returns the nodes of a jaxpr, with calls inlined; the last one is its output."""
    nodes: list[_Node] = []

    def new(*attributes):
        nodes.append(_Node(*attributes))
        return len(nodes) - 1

    def constant(x):
        return new("", (), np.size(x), False, _known(x))

    def through(jaxpr, consts, inputs):
        numbers = dict(zip(jaxpr.constvars, consts, strict=True))
        numbers.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom):
            known = isinstance(atom, core.Literal)
            return constant(atom.val) if known else numbers[atom]

        for equation in jaxpr.eqns:
            name, read_in = equation.primitive.name, [*map(read, equation.invars)]
            inner = [*core.jaxprs_in_params(equation.params)]
            if name in _CALLS and len(inner) == 1 and not inner[0].constvars:
                made = through(inner[0], (), read_in)
            else:
                varies = any(nodes[i].varies for i in read_in)
                known = tuple(x for one in inner for x in _literals(one))
                made = [
                    new(name, read_in, v.aval.size, varies, known, equation)
                    for v in equation.outvars
                ]
            numbers.update(zip(equation.outvars, made, strict=True))
        return [*map(read, jaxpr.outvars)]

    pairs = zip(closed.jaxpr.invars, batch, strict=True)
    inputs = [new("", (), v.aval.size, varies) for v, varies in pairs]
    consts = [*map(constant, closed.consts)]
    [output] = through(closed.jaxpr, consts, inputs)
    last = nodes[output]
    new("reshape", (output,), last.size, last.varies)
    return nodes


def _known(x: Any) -> tuple[float, ...]:
    """Returns the value of a constant if it is one number."""
    is_real = np.size(x) == 1 and jnp.result_type(x).kind in "iuf"
    return (float(np.ravel(x)[0]),) if is_real else ()


def _literals(jaxpr: Any) -> Iterator[float]:
    """Yields all known numbers of a jaxpr and of the jaxprs in it."""
    for atom in [x for equation in equations(jaxpr) for x in equation.invars]:
        if isinstance(atom, core.Literal):
            yield from _known(atom.val)
