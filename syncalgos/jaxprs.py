"""Walks through jaxprs without computing anything."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields all equations of a jaxpr, and those of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield from within(equation)


def within(equation: Any) -> Iterator[Any]:
    """Yields an equation, then the equations of the jaxprs inside it."""
    yield equation
    for inner in core.jaxprs_in_params(equation.params):
        yield from equations(inner)
