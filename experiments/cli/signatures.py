"""Signatures of factories: asked of the function, or read from its source.

Sources are read because importing them imports jax: an answer to a bad request takes a
fifth of a second instead of two.
"""

import ast
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TYPES = {"bool": bool, "float": float, "int": int, "str": str, "Any": Any}
TYPES |= {"Literal": typing.Literal, "Callable": Callable, "__builtins__": {}}
# A default that is no word: no flag can set the parameter.
UNKNOWN = object()


class Signature(NamedTuple):
    """A factory as the command line sees it.

    Attributes:
        parameters: with types as annotations, `empty` where they are not resolved.
        doc: its docstring.
    """

    parameters: list[inspect.Parameter]
    doc: str


def of(factory: Callable[..., Any]) -> Signature:
    """Returns the signature of a function.

    Raises:
        TypeError, ValueError: it is no function, or has no signature.
    """
    parameters = inspect.signature(factory).parameters.values()
    try:
        hints = typing.get_type_hints(factory)
    except (NameError, TypeError):  # only a type checker can resolve them
        hints = {}
    typed = [p.replace(annotation=hints.get(p.name, p.empty)) for p in parameters]
    return Signature(typed, inspect.getdoc(factory) or "")


def in_source(path: Path, name: str) -> Signature:
    """Reads the signature of a function from its file, without running it.

    A default or an annotation is evaluated where it consists of what needs no import:
    numbers, strings, bool, float, int, str, None and Literal.
    """
    # A test compares what is read here with the functions' own signatures.
    module = ast.parse(path.read_text("utf-8"))
    [function] = (
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    form = function.args
    arguments = [*form.args, *form.kwonlyargs]
    lacking = [None] * (len(form.args) - len(form.defaults))
    defaults = [*lacking, *form.defaults, *form.kw_defaults]
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(
            argument.arg,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if default is None else _evaluated(default, UNKNOWN),
            annotation=_evaluated(argument.annotation, empty),
        )
        for argument, default in zip(arguments, defaults, strict=True)
    ]
    return Signature(parameters, ast.get_docstring(function) or "")


def _evaluated(node: ast.expr | None, otherwise: Any) -> Any:
    """Returns the value of an expression, or `otherwise` if it needs an import."""
    if node is None:
        return otherwise
    # The sources are those of this checkout, and no names but TYPES are in reach.
    try:
        return eval(compile(ast.Expression(node), "factory", "eval"), dict(TYPES))
    except NameError:
        return otherwise
