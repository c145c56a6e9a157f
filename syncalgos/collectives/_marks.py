"""Marks of this library's collectives in a program whose traffic is counted.

How a collective sends depends on how the workers lie: between lanes of one device it
is a sum in memory. What a strategy asks for must not. A mark tells the two apart.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from syncalgos.collectives._axes import COUNTED

Function = TypeVar("Function", bound=Callable[..., Any])

# With the number of an object, as a function of a user's may have any name.
_PREFIX = f"syncalgos.collectives.{id(COUNTED)}."


def marked(function: Function) -> Function:
    """Decorates a collective: while traffic is counted, each call is one jit equation.

    Args:
        function: (tree, ...) -> tree, with settings after the tree.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(tree, *args, **kwargs):
        if not COUNTED.get():
            return function(tree, *args, **kwargs)
        bound = signature.bind(tree, *args, **kwargs)
        bound.apply_defaults()
        settings = [*bound.arguments.values()][1:]
        static_settings = [x for x in settings if not isinstance(x, jax.Array)]

        def collective(tree):
            return function(tree, *settings)

        shapes = [jax.typeof(x).str_short() for x in jax.tree.leaves(tree)]
        collective.__name__ = (
            f"{_PREFIX}{function.__name__}{static_settings} of {shapes}"
        )
        return jax.jit(collective)(tree)

    return call  # type: ignore[return-value]  # the same type for its callers


def find_mark(equation: Any) -> str | None:
    """The name, settings and shapes of a marked collective; None for what is none."""
    name = equation.params.get("name")
    is_marked = isinstance(name, str) and name.startswith(_PREFIX)
    return name.removeprefix(_PREFIX) if is_marked else None
