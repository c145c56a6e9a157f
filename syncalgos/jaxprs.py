"""Walks through jaxprs without computing anything, by one table of what a call is."""

from collections.abc import Callable, Container, Iterator
from typing import Any

import jax
from jax.extend import core

# Primitives that run the one jaxpr in their parameters on their own operands.
CALLS = {"jit", "closed_call", "core_call", "remat2", "checkpoint", "composite"}
CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}

# Others whose jaxprs are all that they run, or whose functions return nothing; names
# begin so.
SHOWN = ("cond", "scan", "while", "reduce", "scatter", "select_and_scatter", "random_")
SHOWN += ("custom_linear_solve", "debug_")

# Primitives that name an axis, but send nothing along it.
SILENT = {"axis_index", "pvary"}


def axes(equation: Any, mapped: Container[str] = ()) -> list[str]:
    """Returns the names of axes along which an equation may send, if any.

    Args:
        equation: the equation.
        mapped: names that tell of an axis in any parameter of an unknown primitive.
    """
    # jax writes `axes` for a psum and `axis_name` for other collectives; numbers there
    # are the axes of an array.
    if equation.primitive.name in SILENT:
        return []
    return [
        x
        for key, value in equation.params.items()
        for x in jax.tree.leaves(value)
        if isinstance(x, str)
        and (key.startswith("ax") or (x in mapped and key != "name"))
    ]


def inner(equation: Any) -> list[Any]:
    """Returns the jaxprs in an equation's parameters, with their constants."""
    return [x for x in _parts(equation) if _is_jaxpr(x)]


def hides(equation: Any) -> bool:
    """Whether an equation may run what no jaxpr in it shows: functions, kernels."""
    name = equation.primitive.name
    if name == "ffi_call":
        return True
    calls = [x for x in _parts(equation) if callable(x) and not isinstance(x, type)]
    return bool(inner(equation) or calls) and not name.startswith(SHOWN)


def within(equation: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields an equation and those of the jaxprs inside it, with their known passes."""
    yield equation, times
    for jaxpr in inner(equation):
        yield from equations(jaxpr, times * equation.params.get("length", 1))


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields all equations of a jaxpr and of those inside it, as `within` does."""
    for equation in jaxpr.eqns:
        yield from within(equation, times)


def follow(
    jaxpr: Any, inputs: list, visit: Callable[[Any, list], list], literals: bool = True
) -> list:
    """Follows values of any kind through a jaxpr; returns those of its outputs.

    Args:
        jaxpr: the jaxpr, with or without its constants.
        inputs: a value for each input.
        visit: (equation, its operands' values) -> a value for each of its results.
        literals: whether numbers and constants in the jaxpr are values, or None.
    """
    consts = jaxpr.consts if isinstance(jaxpr, core.ClosedJaxpr) and literals else ()
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    values: dict = dict(zip(jaxpr.constvars, consts, strict=False))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return atom.val if literals else None
        return values.get(atom)

    for equation in jaxpr.eqns:
        results = visit(equation, [*map(read, equation.invars)])
        values.update(zip(equation.outvars, results, strict=True))
    return [*map(read, jaxpr.outvars)]


def _parts(equation: Any) -> list[Any]:
    """Returns everything in an equation's parameters, out of tuples and the like."""
    return jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)
