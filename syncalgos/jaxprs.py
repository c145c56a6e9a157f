"""Walks through jaxprs, of which nothing is computed."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of those in it."""
    for equation in jaxpr.eqns:
        yield from within(equation)


def within(equation: Any) -> Iterator[Any]:
    """An equation, and after it those of the jaxprs that it holds."""
    yield equation
    for inner in core.jaxprs_in_params(equation.params):
        yield from equations(inner)
