"""Factories by name, and their parameters as flags: of algorithms and of tasks."""

import argparse
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.errors import BadRequest, place

Factory = Callable[..., Any]


class Kind(NamedTuple):
    """What a factory makes.

    Attributes:
        flag: that names one, without dashes.
        noun: for errors.
        passed: parameters that are no flags: the harness passes its own.
    """

    flag: str
    noun: str
    passed: frozenset[str]


ALGORITHM = Kind(
    "algo",
    "algorithm",
    frozenset({"axis", "seed", "learning_rate", "optimizer", "hosts"}),
)
TASK = Kind("task", "task", frozenset({"axis", "seed", "data_dir", "workers"}))


def whole(text: str) -> int:
    """An int from a flag."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number, got {text!r}"
        ) from None


def number(text: str) -> float:
    """A float from a flag."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def literal(text: str) -> int | float | str:
    """What a flag without a declared type most likely means."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def find(kind: Kind, name: str, known: Mapping[str, Factory | str]) -> Factory:
    """The factory of that name, or the user's package.module:factory.

    Args:
        kind: what it makes.
        name: what the user said.
        known: factories by name; or where they are, as package.module:factory.

    Raises:
        BadRequest: there is none.
    """
    from syncalgos import checks  # imports jax

    if ":" in name:
        return _import(kind, name)
    try:
        found = known[checks.one_of(kind.noun, name, known)]
    except ValueError as error:
        raise BadRequest(f"{error}; your own: package.module:factory") from None
    return _import(kind, found) if isinstance(found, str) else found


def _import(kind: Kind, name: str) -> Factory:
    from syncalgos import checks

    where = f"--{kind.flag} {name}"
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        raise BadRequest(f"{where}: say {module[:-3]}:{attribute}, without .py")
    try:
        names = vars(importlib.import_module(module))
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        what = type(error).__name__
        raise BadRequest(
            f"{where}: cannot import {module!r}: {what}: {error}{place(error)}"
        ) from error
    found = names.get(attribute)
    try:
        if found is not None and inspect.signature(found):
            return found
    except (TypeError, ValueError):  # no function, or one that tells no parameters
        found = None
    hint = checks.nearest(attribute, names)
    raise BadRequest(f"{where}: {module!r} has no factory {attribute!r}{hint}")


def flag_parameters(kind: Kind, factory: Factory) -> list[inspect.Parameter]:
    """The parameters of a factory that become flags: those that a word can set."""
    words = bool | int | float | str | None
    return [
        p
        for p in inspect.signature(factory).parameters.values()
        if p.name not in kind.passed
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and (p.default is p.empty or isinstance(p.default, words))
    ]


def passed_arguments(
    kind: Kind, factory: Factory, offered: Mapping[str, Any]
) -> dict[str, Any]:
    """Of what the harness offers, that which the factory asks for by name."""
    wanted = inspect.signature(factory).parameters
    return {
        name: value
        for name, value in offered.items()
        if name in kind.passed and name in wanted
    }


def add_flags(
    parser: argparse.ArgumentParser, kind: Kind, name: str, factory: Factory
) -> None:
    """Adds a factory's parameters to a parser, with its docstring's words.

    Raises:
        BadRequest: a parameter has the name of a flag that is there.
    """
    summary = (inspect.getdoc(factory) or "").partition("\n")[0]
    group = parser.add_argument_group(f"flags of {name}", summary or None)
    meanings = argument_texts(inspect.getdoc(factory) or "")
    try:
        hints = typing.get_type_hints(factory)
    except (NameError, TypeError):  # annotations that only a type checker can resolve
        hints = {}
    taken = {action.dest for action in parser._actions}
    for parameter in flag_parameters(kind, factory):
        if parameter.name in taken:
            raise BadRequest(
                f"--{kind.flag} {name}: its parameter {parameter.name!r} has the name "
                "of another flag: rename it"
            )
        required = parameter.default is parameter.empty
        text = meanings.get(parameter.name, "").replace("%", "%%")
        shown = "" if required else f" (default: {parameter.default})".lower()
        group.add_argument(
            f"--{parameter.name.replace('_', '-')}",
            default=None if required else parameter.default,
            required=required,
            help=(text + shown).strip(),
            **_flag_kind(hints.get(parameter.name) or type(parameter.default)),
        )


def _flag_kind(hint: Any) -> dict[str, Any]:
    """What argparse needs to know of a parameter's type."""
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        return {"choices": choices, "type": type(choices[0])}
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    if bool in options:
        return {"action": argparse.BooleanOptionalAction}
    kinds = {float: (number, "X"), int: (whole, "N"), str: (str, "TEXT")}
    chosen = [kinds[kind] for kind in kinds if kind in options]
    convert, metavar = chosen[0] if chosen else (literal, "VALUE")
    if types.NoneType in options:
        convert = _or_none(convert)
    return {"type": convert, "metavar": metavar}


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else convert(text)


def argument_texts(doc: str) -> dict[str, str]:
    """The texts of a Google docstring's Args section by name, each on one line."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", doc, re.MULTILINE)
    if not section:
        return {}
    entries = re.findall(
        r"^    (\w+)(?: \([^)]*\))?: (.*(?:\n     +.*)*)", section[1], re.MULTILINE
    )
    return {name: " ".join(text.split()) for name, text in entries}
