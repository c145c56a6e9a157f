"""Signatures as the source has them: with the short names of types."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

BOUND = ("self", "cls")


class Parameter(NamedTuple):
    """A parameter of a function, in the words of its source.

    Attributes:
        name: with its stars.
        kind: the annotation, or nothing.
        default: or nothing.
    """

    name: str
    kind: str
    default: str

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return not self.default

    def __str__(self) -> str:
        kind = f": {self.kind}" if self.kind else ""
        between = " = " if kind else "="
        return self.name + kind + ("" if self.required else between + self.default)


def definition(function: Callable) -> ast.FunctionDef:
    """Returns the syntax tree of a function."""
    found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


def parameters(function: Callable) -> list[Parameter]:
    """Returns the parameters of a function, without self."""
    arguments = definition(function).args
    plain = [*arguments.posonlyargs, *arguments.args]
    values = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    found = [made(x, value) for x, value in zip(plain, values, strict=True)]
    if arguments.vararg:
        found.append(made(arguments.vararg, None, "*"))
    elif arguments.kwonlyargs:
        found.append(Parameter("*", "", ""))
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [made(x, value) for x, value in named]
    if arguments.kwarg:
        found.append(made(arguments.kwarg, None, "**"))
    return [parameter for parameter in found if parameter.name not in BOUND]


def made(argument: ast.arg, default: ast.expr | None, stars: str = "") -> Parameter:
    """Returns a parameter from its syntax tree."""
    kind = ast.unparse(argument.annotation) if argument.annotation else ""
    value = ast.unparse(default) if default is not None else ""
    if value == "checks.REQUIRED":
        value = ""
    return Parameter(stars + argument.arg, kind, value)


def text(thing: Any) -> str | None:
    """Returns "(a: int = 1, ...)" of a function, or None for what has no source."""
    if inspect.isclass(thing):
        # A NamedTuple has no __init__ of its own: its fields are listed below it.
        thing = vars(thing).get("__init__")
    if not inspect.isfunction(thing):
        return None
    try:
        return f"({', '.join(map(str, parameters(thing)))})"
    except (AssertionError, OSError, SyntaxError):
        return None
