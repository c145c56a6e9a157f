"""Factories of algorithms and tasks: found by name, their parameters as flags."""

import argparse
import ast
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import syncalgos
from experiments import tasks
from experiments.cli import signatures
from experiments.cli.errors import BadRequest, explained, place
from experiments.cli.signatures import Signature
from experiments.cli.words import literal, number, whole
from experiments.exit_codes import Terminated
from syncalgos import checks

Factory = Callable[..., Any]
OWN = "your own"  # the name of what Python code has given as an object

# The registry's names are those of its files, which need no import.
_ALGORITHMS = sorted(Path(syncalgos.__file__).parent.glob("algorithms/[!_]*.py"))


class Kind(NamedTuple):
    """A kind of factory.

    Attributes:
        flag: the one that names a factory, without dashes.
        noun: for errors.
        package: where the registered ones are: NAME in PACKAGE.NAME.
        passed: parameters that are no flags: the harness passes its own.
        files: the registered names, and where their factories are written.
        several: how to ask for several, in words.
    """

    flag: str
    noun: str
    package: str
    passed: frozenset[str]
    files: Mapping[str, Path]
    several: str = ""


ALGORITHM = Kind(
    "algo",
    "algorithm",
    "syncalgos.algorithms",
    frozenset({"axis", "seed", "learning_rate", "optimizer", "hosts", "stacked"}),
    {path.stem: path for path in _ALGORITHMS},
    "; to compare several: python -m experiments.compare --algos ",
)
TASK = Kind(
    "task",
    "task",
    "experiments.tasks",
    frozenset({"axis", "seed", "data_dir", "workers"}),
    {name: Path(tasks.__file__).with_name(f"{name}.py") for name in tasks.TASKS},
)


def describe(kind: Kind, name: str) -> Signature:
    """Returns the signature of a registered factory, or of the user's own.

    Only the user's own is imported.

    Raises:
        BadRequest: there is none.
    """
    if ":" in name or name == OWN:
        return signatures.of(named(kind, name))
    return signatures.in_source(kind.files[_known(kind, name)], name)


def named(kind: Kind, name: str) -> Factory:
    """Returns the factory of a registered name, or the user's package.module:factory.

    Raises:
        BadRequest: there is none.
    """
    if name == OWN:
        return lambda: None  # it is there already, and takes nothing
    if ":" in name:
        return _import(kind, name)
    return _import(kind, f"{kind.package}.{_known(kind, name)}:{name}")


def call(
    kind: Kind,
    name: str,
    arguments: Mapping[str, Any],
    offered: Mapping[str, Any],
    check: Callable[[Any], None],
) -> Any:
    """Calls a factory with its flags, and with what it takes of what is offered.

    Args:
        kind: algorithm or task.
        name: of the factory.
        arguments: values of its flags.
        offered: values that the harness passes to those that have parameters for them.
        check: raises a ValueError for a result that cannot be used.

    Raises:
        BadRequest: what a user's factory raises; a ValueError if it is one of ours.
    """
    with explained(kind.flag, name):
        factory = named(kind, name)
        made = factory(**arguments, **passed_arguments(kind, factory, offered))
        check(made)
    return made


def _known(kind: Kind, name: str) -> str:
    """Returns the name if it is registered, or raises a BadRequest."""
    if "," in name:
        several = kind.several and f"{kind.several}{name}"
        raise BadRequest(f"--{kind.flag} takes one {kind.noun}, got {name!r}{several}")
    if name.split()[:1] != [name]:
        own = "leave the quotation marks out, so that its flags are words of their own"
        raise BadRequest(f"--{kind.flag} takes one {kind.noun}, got {name!r}: {own}")
    if name not in kind.files and (path := Path(f"{name}.py")).is_file():
        raise BadRequest(
            f"unknown {kind.noun} {name!r}, but {path} is here: say --{kind.flag} "
            f"{name}:FACTORY; its functions are {', '.join(_functions(path)) or 'none'}"
        )
    try:
        return checks.one_of(kind.noun, name, kind.files)
    except ValueError as error:
        raise BadRequest(f"{error}; your own: package.module:factory") from None


def _functions(path: Path) -> list[str]:
    """Returns the names of a file's public functions, without running it."""
    try:
        nodes = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    found = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    return [name for name in found if not name.startswith("_")]


def _import(kind: Kind, name: str) -> Factory:
    where = f"--{kind.flag} {name}"
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        raise BadRequest(f"{where}: say {module[:-3]}:{attribute}, without .py")
    try:
        names = vars(importlib.import_module(module))
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        what = type(error).__name__
        raise BadRequest(
            f"{where}: cannot import {module!r}: {what}: {error}{place(error)}"
        ) from error
    if attribute not in names:
        hint = checks.nearest(attribute, [x for x in names if callable(names[x])])
        raise BadRequest(f"{where}: {module!r} has no {attribute!r}{hint}")
    # Its parameters become flags, so it must have a signature.
    try:
        inspect.signature(names[attribute])
    except (TypeError, ValueError):  # no function, or one that has no signature
        raise BadRequest(
            f"{where}: {attribute!r} must be a function that makes the {kind.noun}, "
            f"got {checks.shown(names[attribute])}"
        ) from None
    return names[attribute]


def flag_parameters(kind: Kind, signature: Signature) -> list[inspect.Parameter]:
    """Returns the parameters that become flags: a word can set them."""
    # Functions and arrays are for callers from Python: no word can say them.
    words = bool | int | float | str | None
    return [
        p
        for p in signature.parameters
        if p.name not in kind.passed
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and (p.default is p.empty or isinstance(p.default, words))
    ]


def flag_names(kind: Kind, name: str) -> set[str]:
    """Returns the names of a factory's flags."""
    return {p.name for p in flag_parameters(kind, describe(kind, name))}


def defaults(kind: Kind, name: str) -> dict[str, Any]:
    """Returns the defaults of a factory's flags."""
    return defaults_of(kind, describe(kind, name))


def defaults_of(kind: Kind, signature: Signature) -> dict[str, Any]:
    """Returns the defaults of the flags of a signature."""
    parameters = flag_parameters(kind, signature)
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def passed_arguments(
    kind: Kind, factory: Factory, offered: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the offered values that the factory has parameters for."""
    wanted = inspect.signature(factory).parameters
    return {
        name: value
        for name, value in offered.items()
        if name in kind.passed and name in wanted
    }


def add_flags(
    parser: argparse.ArgumentParser, kind: Kind, name: str, signature: Signature
) -> None:
    """Adds a factory's parameters to a parser, with the texts of its docstring.

    Raises:
        BadRequest: a parameter with the name of an existing flag.
    """
    summary = signature.doc.partition("\n")[0]
    group = parser.add_argument_group(f"flags of {name}", summary or None)
    meanings = argument_texts(signature.doc)
    taken = {action.dest for action in parser._actions}
    for parameter in flag_parameters(kind, signature):
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
            **flag_kind(parameter),
        )


def flag_kind(parameter: inspect.Parameter) -> dict[str, Any]:
    """Returns the arguments of `add_argument` that follow from a parameter's type."""
    hint = parameter.annotation
    hint = type(parameter.default) if hint is parameter.empty else hint
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    may_be_none = types.NoneType in options
    if bool in options:
        return {"action": argparse.BooleanOptionalAction}
    literals = [x for x in options if typing.get_origin(x) is typing.Literal]
    if literals:
        choices = [*typing.get_args(literals[0]), *([None] if may_be_none else [])]
        return choice({"none" if x is None else str(x): x for x in choices})
    kinds = {float: (number, "X"), int: (whole, "N"), str: (str, "TEXT")}
    chosen = [kinds[kind] for kind in kinds if kind in options]
    convert, metavar = chosen[0] if chosen else (literal, "VALUE")
    return {"type": _or_none(convert) if may_be_none else convert, "metavar": metavar}


def choice(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for a flag with one of these values."""

    def convert(text: str) -> Any:
        try:
            return values[checks.one_of("value", text, values)]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return {"type": convert, "metavar": f"{{{','.join(values)}}}"}


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else convert(text)


def argument_texts(doc: str) -> dict[str, str]:
    """Returns the texts of a Google docstring's arguments by name, in one line."""
    heading = r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)*)"
    if not (section := re.search(heading, doc, re.MULTILINE)):
        return {}
    entries = re.findall(
        r"^    (\w+)(?: \([^)]*\))?: (.*(?:\n     +.*)*)", section[1], re.MULTILINE
    )
    return {name: " ".join(text.split()) for name, text in entries}
