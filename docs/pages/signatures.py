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
    function_node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(function_node, ast.FunctionDef)
    return function_node


def parameters(function: Callable) -> list[Parameter]:
    """Returns the parameters of a function, without self."""
    arguments = definition(function).args
    plain = [*arguments.posonlyargs, *arguments.args]
    values = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    converted = [
        make_parameter(x, value) for x, value in zip(plain, values, strict=True)
    ]
    if arguments.vararg:
        converted.append(make_parameter(arguments.vararg, None, "*"))
    elif arguments.kwonlyargs:
        converted.append(Parameter("*", "", ""))
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    converted += [make_parameter(x, value) for x, value in keyword_only]
    if arguments.kwarg:
        converted.append(make_parameter(arguments.kwarg, None, "**"))
    return [parameter for parameter in converted if parameter.name not in BOUND]


def make_parameter(
    argument: ast.arg, default: ast.expr | None, stars: str = ""
) -> Parameter:
    """Returns a parameter from its syntax tree."""
    kind = ast.unparse(argument.annotation) if argument.annotation else ""
    value = ast.unparse(default) if default is not None else ""
    if value == "checks.REQUIRED":
        value = ""
    return Parameter(stars + argument.arg, kind, value)


def signature_text(obj: Any) -> str | None:
    """Returns "(a: int = 1, ...)" of a function, or None for what has no source."""
    if inspect.isclass(obj):
        # A NamedTuple has no __init__ of its own: its fields are listed below it.
        obj = vars(obj).get("__init__")
    if not inspect.isfunction(obj):
        return None
    try:
        return f"({', '.join(map(str, parameters(obj)))})"
    except (AssertionError, OSError, SyntaxError):
        return None
