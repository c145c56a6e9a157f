"""Whether a loss is a mean over its batch, read off its trace.

Sums, and means over what is not masked, are none: of several workers' batches as one
they are something else than the mean over the workers.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Equations that stand for the jaxpr they hold.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call"}
# Those that add, or leave as it is, what their inputs hold.
_LINEAR = {"add": (1, 1), "add_any": (1, 1), "sub": (1, -1), "neg": (-1,)}
_KEEPING = {"reduce_sum", "convert_element_type", "copy", "reshape", "squeeze"}
_KEEPING |= {"transpose", "broadcast_in_dim"}


class _Node(NamedTuple):
    """An input, a constant, or what an equation makes.

    Attributes:
        name: of the primitive; "" of inputs and constants.
        inputs: numbers of the nodes from which it is made.
        size: its numbers.
        varies: whether it depends on the batch.
        value: of a constant that is one number.
    """

    name: str
    inputs: Sequence[int]
    size: int
    varies: bool
    value: float | None = None


def is_mean(small: Any, large: Any, batch: Sequence[bool], times: int) -> bool:
    """Whether a program returns a mean over its batch.

    No, unless it is a sum of values, divided by a number that is known and grows with
    the batch, and of what does not depend on the batch. What the value of an example
    takes from other examples is not seen.

    Args:
        small: the program's closed jaxpr; it returns a scalar.
        large: that for a batch of more examples.
        batch: for each input, whether it is of the batch.
        times: how many times as many examples.
    """
    few, many = (_terms(*_graph(one, batch)) for one in (small, large))
    return len(few) == len(many) and all(
        math.isclose(weight, times * less, rel_tol=1e-5) and more == times * size
        for (size, weight), (more, less) in zip(few, many, strict=True)
    )


def _terms(nodes: Sequence[_Node], last: int) -> list[tuple[int, float]]:
    """The values of which a node is a weighted sum: how many, and their weight."""
    weights, found = {last: 1.0}, []
    for number in range(last, -1, -1):  # inputs come before what is made of them
        weight, node = weights.get(number), nodes[number]
        if weight is None or not node.varies:
            continue
        shares = _shares(node.name, [nodes[i].value for i in node.inputs])
        if shares is None:
            found.append((node.size, weight))
        else:
            for i, share in zip(node.inputs, shares, strict=False):
                weights[i] = weights.get(i, 0.0) + weight * share
    return found


def _shares(name: str, known: Sequence[float | None]) -> Sequence[float] | None:
    """How much of each input is in what an equation makes; None if it is no sum."""
    if name in _KEEPING:
        return (1,)
    if name == "mul" and known[0] is not None:
        return 0, known[0]
    if name == "mul" and known[1] is not None:
        return known[1], 0
    if name == "div" and known[1]:
        return 1 / known[1], 0
    return _LINEAR.get(name)


def _graph(closed: Any, batch: Sequence[bool]) -> tuple[list[_Node], int]:
    """The nodes of a jaxpr, calls taken apart, and the number of its first output."""
    nodes: list[_Node] = []

    def new(*attributes):
        nodes.append(_Node(*attributes))
        return len(nodes) - 1

    def constant(x):
        is_number = np.size(x) == 1 and jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return new(
            "", (), np.size(x), False, float(np.ravel(x)[0]) if is_number else None
        )

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
                made = [
                    new(name, read_in, v.aval.size, varies) for v in equation.outvars
                ]
            numbers.update(zip(equation.outvars, made, strict=True))
        return [*map(read, jaxpr.outvars)]

    pairs = zip(closed.jaxpr.invars, batch, strict=True)
    inputs = [new("", (), v.aval.size, varies) for v, varies in pairs]
    consts = [*map(constant, closed.consts)]
    return nodes, through(closed.jaxpr, consts, inputs)[0]
