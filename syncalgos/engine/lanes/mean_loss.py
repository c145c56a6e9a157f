"""Whether a loss is a mean over its batch, found in its trace.

Sums are not, nor are means over unmasked values: over the merged batches of several
workers they differ from the mean over the workers.
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
# Equations whose entries add up to these factors times the sums of the inputs.
_ADDING = {"add": (1, 1), "add_any": (1, 1), "sub": (1, -1), "neg": (-1,)}
_KEEPING = {"broadcast_in_dim", "convert_element_type", "copy", "reshape"}
_ADDING |= dict.fromkeys(_KEEPING | {"squeeze", "transpose"}, (1,))


class _Node(NamedTuple):
    """An input, a constant, or the result of an equation.

    Attributes:
        name: of the primitive; "" of inputs and constants.
        inputs: indices of the nodes from which it is made.
        size: how many entries it has.
        varies: whether it depends on the batch.
        known: of a constant, its value if it is one number; of an equation, all such
            in the jaxprs that it holds.
        equation: None of inputs and constants.
    """

    name: str
    inputs: Sequence[int]
    size: int
    varies: bool
    known: tuple[float, ...] = ()
    equation: Any = None

    @property
    def is_fixed(self) -> bool:
        """Whether it is an input that is no batch, or a constant."""
        return not (self.name or self.varies)


class _Term(NamedTuple):
    """A node of which a sum is made, its number, and its weight there."""

    number: int
    node: _Node
    weight: float


def is_mean(small: Any, large: Any, batch: Sequence[bool], times: int) -> bool:
    """Whether a program returns a mean over its batch.

    It does if it is a sum of terms: values of examples, summed and divided by a known
    number that grows with the batch; and terms that do not depend on the batch. The
    value of an example depends neither on others (`examples.are_apart`) nor on their
    number, nor on its own place among them. Callbacks may do anything, such as count
    their calls, and so may a function's own backward pass, such as clip gradients.

    Args:
        small: the program's closed jaxpr; it returns a scalar.
        large: that for a batch of more examples.
        batch: for each input, whether it is of the batch.
        times: how many times as many examples.
    """
    names = [x.primitive.name for x in equations(small.jaxpr)]
    if any(x.startswith("custom_vjp") or "callback" in x for x in names):
        return False
    few, many = _graph(small, batch), _graph(large, batch)
    terms, others = _terms(few), _terms(many)
    if [x.name for x in few] != [x.name for x in many] or len(terms) != len(others):
        return False
    changed = {i for i, x in enumerate(few) if x.known != many[i].known}
    # A constant as long as the batch goes by the examples' position.
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
    """The numbers of nodes, and of all those of which they are made.

    Args:
        nodes: in the order of the program.
        needed: numbers of some.
    """
    for number, node in reversed([*enumerate(nodes)]):
        if number in needed:
            needed = needed.union(node.inputs)
    return needed


def has_own_derivative(closed: Any) -> bool:
    """Whether a jaxpr holds a function whose derivative is a program of its own."""
    found = equations(closed.jaxpr)
    return any(x.primitive.name == "custom_jvp_call" for x in found)


def _grows(term: _Term, other: _Term, times: int) -> bool:
    """Whether a term is that of a mean, or the same for any batch."""
    by = times if term.node.varies else 1
    weighs = math.isclose(term.weight, by * other.weight, rel_tol=1e-5)
    same = term.node.known == other.node.known
    return weighs and same and other.node.size == by * term.node.size


def _terms(nodes: Sequence[_Node]) -> list[_Term]:
    """Decomposes the output into a weighted sum."""
    weights, found = {len(nodes) - 1: 1.0}, []
    # Backwards: inputs come before what is made of them, so weights are complete.
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
    """The weight of each input in an equation's result; None if it is no sum."""
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
    # A number that is broadcast counts so many times.
    return [
        f * node.size / max(1, x.size) for f, x in zip(factors, inputs, strict=False)
    ]


def _graph(closed: Any, batch: Sequence[bool]) -> list[_Node]:
    """The nodes of a jaxpr, calls taken apart; the last one is its output."""
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
    """The value of a constant that is one number."""
    is_real = np.size(x) == 1 and jnp.result_type(x).kind in "iuf"
    return (float(np.ravel(x)[0]),) if is_real else ()


def _literals(jaxpr: Any) -> Iterator[float]:
    """All known numbers of a jaxpr and of those in it."""
    for atom in [x for equation in equations(jaxpr) for x in equation.invars]:
        if isinstance(atom, core.Literal):
            yield from _known(atom.val)
