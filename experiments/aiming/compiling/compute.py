"""Floating-point operations of a program, counted from its jaxpr."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend import core


class Flops(NamedTuple):
    """The operations of products and convolutions.

    Attributes:
        least: number if every condition takes the branch with the fewest operations.
        most: number if every condition takes the branch with the most operations.
    """

    least: float = 0.0
    most: float = 0.0


def flops(jaxpr: Any) -> Flops:
    """Counts the operations of a jaxpr: 2 for each multiplication and its addition.

    Loops count as often as they run, or once if their length is unknown. Recomputation
    in a gradient counts again. Elementwise operations are left out, because memory
    bounds their speed.

    Args:
        jaxpr: a jaxpr, closed or not.
    """
    found = [_of_equation(x) for x in getattr(jaxpr, "jaxpr", jaxpr).eqns]
    return Flops(sum(x.least for x in found), sum(x.most for x in found))


def _of_equation(equation: Any) -> Flops:
    """Counts one equation, with what it calls."""
    name, params = equation.primitive.name, equation.params
    if count := _PRODUCTS.get(name):
        operations = count(equation)
        return Flops(operations, operations)
    inner = [flops(x) for x in core.jaxprs_in_params(params)]
    if name == "cond":
        return Flops(min(x.least for x in inner), max(x.most for x in inner))
    times = params.get("length", 1) if name == "scan" else 1
    return Flops(
        times * sum(x.least for x in inner), times * sum(x.most for x in inner)
    )


def _of_dot(equation: Any) -> float:
    """Returns twice the entries of the result times the contracted ones."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2.0 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)


def _of_convolution(equation: Any) -> float:
    """Returns twice the entries of the result times the kernel's for one feature."""
    kernel, numbers = equation.invars[1].aval.shape, equation.params
    features = kernel[numbers["dimension_numbers"].rhs_spec[0]]
    # The kernel's inputs are already per group. The strides of a gradient put zeros
    # between the entries, which are not counted.
    each = math.prod(kernel) / features / math.prod(numbers["lhs_dilation"])
    return 2.0 * equation.outvars[0].aval.size * each


_PRODUCTS: dict[str, Callable[[Any], float]] = {
    "dot_general": _of_dot,
    "conv_general_dilated": _of_convolution,
}
