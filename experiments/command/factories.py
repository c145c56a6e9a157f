"""Factories of algorithms and tasks, found by name; their parameters become flags."""

import argparse
import ast
import importlib
import inspect
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import syncalgos
from experiments import tasks
from experiments.command.errors import (
    STOPS,
    BadRequest,
    explaining_errors,
    in_one_line,
    place,
)
from experiments.command.words import (
    literal,
    number,
    or_none,
    read_choice,
    read_whole_number,
)
from syncalgos import ALIASES, checks

YOUR_OWN = "your own"  # the name of an object that Python code passed
PUBLISHED = Path(__file__).parent / "published.toml"
EMPTY = inspect.Parameter.empty
# Flags of algorithms whose parameters have the names of the inner optimizer's flags.
SPELLED = {"b1": "beta1", "b2": "beta2"}
# The flags of run and of compare, which would be read in place of a factory's own.
RESERVED = """
    accumulate algo algos b1 b2 backend baseline batch_size checkpoint_every clip_norm
    coordinator data_dir devices devices_per_job dispatch_steps displacements
    distributed eval_every export fused help help_all init_from init_timeout jobs keep
    list lr max_restarts measure mesh momentum network num_processes opt_state_at_sync
    optimizer out overwrite partition preset process_id processes resume resume_center
    schedule scheduler seed seeds step_time steps sweep sync_until target task track
    tune tune_seeds validation version warmup_steps weight_decay worker_batch workers
"""


class _Unread:
    """A default that only importing its module would tell: such a one is no flag's."""


# The types that a registered factory's source may name, beside unions of them.
_TYPES = {"bool": bool, "float": float, "int": int, "str": str}

# The registered names are those of the files, so that none is imported.
_TASKS = Path(tasks.__file__).parent
_ALGORITHMS = sorted(Path(syncalgos.__file__).parent.glob("algorithms/[!_]*.py"))


class FactoryKind(NamedTuple):
    """A kind of factory.

    Attributes:
        flag: the flag that names a factory, without dashes.
        noun: the word for the kind in errors.
        package: the package of the registered factories.
        passed: parameters that are not flags, as the harness sets them.
        files: the registered names, and the files of their factories.
        instead: what to use for names that are used elsewhere.
    """

    flag: str
    noun: str
    package: str
    passed: frozenset[str]
    files: Mapping[str, Path]
    instead: Mapping[str, str] = types.MappingProxyType({})


ALGORITHM = FactoryKind(
    "algo",
    "algorithm",
    "syncalgos.algorithms",
    frozenset({"axis", "seed", "learning_rate", "optimizer", "hosts", "layered"}),
    {path.stem: path for path in _ALGORITHMS},
    {alias: f"use {name!r}" for alias, name in ALIASES.items()},
)
TASK = FactoryKind(
    "task",
    "task",
    "experiments.tasks",
    frozenset({"axis", "seed", "data_dir", "workers"}),
    {x: _TASKS / f"{file}.py" for x, file in tasks.TASKS.items()},
)


class Factory(NamedTuple):
    """A factory as the command line sees it.

    Attributes:
        kind: algorithm or task.
        name: a registered name, or package.module:factory.
        parameters: the parameters, with types as annotations.
        doc: the factory's docstring.
    """

    kind: FactoryKind
    name: str
    parameters: Sequence[inspect.Parameter]
    doc: str

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return self.doc.partition("\n")[0]

    @property
    def spelled(self) -> dict[str, str]:
        """The flag of each parameter whose flag has another name."""
        return spellings([p.name for p in self.parameters])

    @property
    def flags(self) -> dict[str, inspect.Parameter]:
        """The parameters that become flags, by the names of these."""
        # No word on a command line can stand for a function or an array.
        words = bool | int | float | str | None
        return {
            self.spelled.get(p.name, p.name): p
            for p in self.parameters
            if p.name not in self.kind.passed
            and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            and (p.default is EMPTY or isinstance(p.default, words))
        }

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of its flags."""
        return {k: p.default for k, p in self.flags.items() if p.default is not EMPTY}

    def published(self) -> "Factory":
        """Returns the factory with the paper's values as defaults (--preset paper)."""
        # The usual defaults have a period of 16. With a paper's period, such as 500, a
        # short run would hardly sync, and a comparison would mostly compare periods.
        values = tomllib.loads(PUBLISHED.read_text()).get(self.name, {})
        changed = [
            p.replace(default=values.get(p.name, p.default)) for p in self.parameters
        ]
        return self._replace(parameters=changed)

    def _named_as_flag(self, name: str) -> BadRequest:
        """Makes the error for a parameter that has the name of another flag."""
        return BadRequest(
            f"--{self.kind.flag} {self.name}: its parameter {name!r} has the name of "
            "another flag: rename the parameter"
        )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Adds the factory's flags to a parser, with help from its docstring.

        Raises:
            BadRequest: a parameter has the name of another factory's flag.
        """
        group = parser.add_argument_group(f"flags of {self.name}", self.summary or None)
        texts = argument_texts(self.doc)
        flag_actions = parser._option_string_actions
        for name, parameter in self.flags.items():
            flag = name.replace("_", "-")
            default = parameter.default
            if f"--{flag}" in flag_actions or f"--no-{flag}" in flag_actions:
                raise self._named_as_flag(name)
            text = texts.get(parameter.name, "").replace("%", "%%")
            if default not in (EMPTY, ""):
                text = f"{text} (default: {str(default).lower()})".strip()
            group.add_argument(
                f"--{flag}",
                help=text,
                required=default is EMPTY,
                default=None if default is EMPTY else default,
                **flag_kind(parameter),
            )


def describe_factory(kind: FactoryKind, name: str) -> Factory:
    """Describes a registered factory, or a custom one.

    Only a custom factory is imported. Registered ones are read from their sources,
    because importing them imports jax. A bad request is thus answered in a fifth of a
    second instead of two seconds.

    Raises:
        BadRequest: there is no such factory.
    """
    if ":" in name or name == YOUR_OWN:
        return of_function(kind, name, find_function(kind, name))
    # A test compares the result with the functions' own signatures.
    path = kind.files[_check_registered(kind, name)]
    functions = ast.parse(path.read_bytes()).body
    [head] = [x for x in functions if isinstance(x, ast.FunctionDef) and x.name == name]
    return _check_factory(Factory(kind, name, _read_parameters(head), _read_doc(head)))


def _read_doc(function: ast.FunctionDef) -> str:
    """Reads the docstring of a function's source, as inspect.getdoc returns it."""
    return ast.get_docstring(function) or ""


def _read_parameters(function: ast.FunctionDef) -> list[inspect.Parameter]:
    """Reads the parameters of a function from its source, without running it."""
    arguments = function.args
    kinds = inspect._ParameterKind
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    parameters: list[inspect.Parameter] = []
    for index, argument in enumerate(positional):
        is_named = index >= len(arguments.posonlyargs)
        place = kinds.POSITIONAL_OR_KEYWORD if is_named else kinds.POSITIONAL_ONLY
        default = None
        if index >= num_required:
            default = arguments.defaults[index - num_required]
        parameters.append(_read_parameter(argument, place, default))
    if arguments.vararg is not None:
        parameters.append(_read_parameter(arguments.vararg, kinds.VAR_POSITIONAL, None))
    for argument, default in zip(
        arguments.kwonlyargs, arguments.kw_defaults, strict=True
    ):
        parameters.append(_read_parameter(argument, kinds.KEYWORD_ONLY, default))
    if arguments.kwarg is not None:
        parameters.append(_read_parameter(arguments.kwarg, kinds.VAR_KEYWORD, None))
    return parameters


def _read_parameter(
    argument: ast.arg, place: Any, default: ast.expr | None
) -> inspect.Parameter:
    """Reads one parameter; a type that is not known is left out."""
    value: Any = EMPTY
    if default is not None:
        value = _read_default(default)
    annotation: Any = EMPTY
    if argument.annotation is not None:
        annotation = _read_type(argument.annotation)
    return inspect.Parameter(argument.arg, place, default=value, annotation=annotation)


def _read_default(node: ast.expr) -> Any:
    """Reads a default: a literal, or a quotient of two, such as 64 / 4096."""
    try:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return ast.literal_eval(node.left) / ast.literal_eval(node.right)
        return ast.literal_eval(node)
    except ValueError:
        return _Unread()


def _read_type(node: ast.expr) -> Any:
    """Reads a type: of `_TYPES` or `checks`, None, Literal, Callable, or their union.

    Returns:
        The type; EMPTY if anything in it is not known.
    """
    match node:
        case ast.Constant(value=None):
            return types.NoneType
        case ast.Name(id=name):
            return _TYPES.get(name, EMPTY)
        case ast.Attribute(value=ast.Name(id="checks"), attr=name):
            return getattr(checks, name)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            words = ast.literal_eval(values)
            return typing.Literal[words]
        case ast.Subscript(value=ast.Name(id="Callable")):
            return Callable
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            members = _read_type(left), _read_type(right)
            if EMPTY in members:
                return EMPTY
            return typing.Union[members]  # noqa: UP007  of values
        case _:
            return EMPTY


def spellings(names: Collection[str]) -> dict[str, str]:
    """Returns the flag of each parameter whose flag has another name."""
    return {k: x for k, x in SPELLED.items() if k in names and x not in names}


def of_function(kind: FactoryKind, name: str, function: Callable[..., Any]) -> Factory:
    """Describes a function.

    Raises:
        BadRequest: a parameter has the name of a flag of run or compare.
        TypeError, ValueError: it is not a function, or has no signature.
    """
    parameters = inspect.signature(function).parameters.values()
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # only a type checker can resolve them
        hints = {}
    typed = [p.replace(annotation=hints.get(p.name, EMPTY)) for p in parameters]
    return _check_factory(Factory(kind, name, typed, inspect.getdoc(function) or ""))


def _check_factory(factory: Factory) -> Factory:
    """Returns the factory; raises a BadRequest for a parameter named as a flag."""
    reserved_names = sorted({*factory.flags} & {*RESERVED.split()})
    if reserved_names:
        raise factory._named_as_flag(reserved_names[0])
    return factory


def find_function(kind: FactoryKind, name: str) -> Callable[..., Any]:
    """Returns the factory of a registered name or of package.module:factory.

    Raises:
        BadRequest: there is no such factory.
    """
    if name == YOUR_OWN:
        return lambda: None  # the object is there already, and takes no flags
    if ":" in name:
        return _import(kind, name)
    return _import(
        kind, f"{kind.package}.{kind.files[_check_registered(kind, name)].stem}:{name}"
    )


def call(
    kind: FactoryKind,
    name: str,
    arguments: Mapping[str, Any],
    offered: Mapping[str, Any],
    check: Callable[[Any], None],
    factory: Callable[..., Any] | None = None,
) -> Any:
    """Calls a factory with its flags and the offered values that it has parameters for.

    Args:
        kind: algorithm or task.
        name: the name of the factory.
        arguments: values of its flags.
        offered: values that the harness passes to factories with such parameters.
        check: raises a ValueError for a result that cannot be used.
        factory: the factory itself, if Python code passed it.

    Raises:
        BadRequest: a custom factory raised an error.
        ValueError: a registered factory refused its arguments.
    """
    with explaining_errors(kind.flag, name):
        if factory is None:
            factory = find_function(kind, name)
        spelled = spellings(inspect.signature(factory).parameters)
        names = {flag: name for name, flag in spelled.items()}
        arguments_by_parameter = {
            names.get(flag, flag): x for flag, x in arguments.items()
        }
        built = factory(
            **arguments_by_parameter, **select_offered(kind, factory, offered)
        )
        check(built)
    return built


def _check_registered(kind: FactoryKind, name: str) -> str:
    """Returns the name if it is registered, or raises a BadRequest."""
    if "," in name and kind is ALGORITHM:
        raise BadRequest(
            f"--algo takes one algorithm, got {name!r}; to compare several: python -m "
            f"experiments.compare --algos {name}"
        )
    if "," in name:
        raise BadRequest(
            f"--{kind.flag} takes one {kind.noun}, got {name!r}: start a command for "
            "each"
        )
    if name.split()[:1] != [name]:
        raise BadRequest(
            f"--{kind.flag} takes one {kind.noun}, got {name!r}: leave out the "
            "quotation marks around the name and its flags"
        )
    path = Path(f"{name}.py")
    if name not in kind.files and os.path.isfile(path):
        raise BadRequest(
            f"unknown {kind.noun} {name!r}, but {path} is here: use --{kind.flag} "
            f"{name}:FACTORY (its functions: {', '.join(_functions(path)) or 'none'})"
        )
    if kind is TASK and name.lower().endswith((".csv", ".npz")):
        raise BadRequest(f"--task {name} is a file: use --task table --file {name}")
    try:
        return checks.one_of(kind.noun, name, kind.files, kind.instead)
    except ValueError as error:
        raise BadRequest(f"{error} (for your own: package.module:factory)") from None


def _functions(path: Path) -> list[str]:
    """Returns the names of a file's public functions, without running it."""
    try:
        nodes = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    function_names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    return [name for name in function_names if not name.startswith("_")]


def _import(kind: FactoryKind, name: str) -> Callable[..., Any]:
    where = f"--{kind.flag} {name}"
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        raise BadRequest(f"{where}: use {module[:-3]}:{attribute}, without .py")
    try:
        names = vars(importlib.import_module(module))
    except STOPS:
        raise
    except BaseException as error:  # whatever the user's module raises
        raise BadRequest(
            f"{where}: cannot import {module!r}: {type(error).__name__}: "
            f"{in_one_line(error)}{place(error)}"
        ) from error
    if attribute not in names:
        nearest = checks.nearest(attribute, [x for x in names if callable(names[x])])
        raise BadRequest(f"{where}: {module!r} has no {attribute!r}{nearest}")
    # Its parameters become flags, so it must have a signature.
    try:
        inspect.signature(names[attribute])
    except (TypeError, ValueError):  # not a function, or one without a signature
        raise BadRequest(
            f"{where}: {attribute!r} must be a function that makes the {kind.noun}, "
            f"got {checks.shown(names[attribute])}"
        ) from None
    return names[attribute]


def select_offered(
    kind: FactoryKind, factory: Callable[..., Any], offered: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the offered values that the factory has parameters for."""
    wanted = kind.passed & inspect.signature(factory).parameters.keys()
    return {name: value for name, value in offered.items() if name in wanted}


def flag_kind(parameter: inspect.Parameter) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for a parameter's type."""
    hint = parameter.annotation
    hint = type(parameter.default) if hint is EMPTY else hint
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    may_be_none = types.NoneType in options
    if bool in options:
        return {"action": argparse.BooleanOptionalAction}
    literals = [x for x in options if typing.get_origin(x) is typing.Literal]
    if literals:
        values = {str(x): x for x in typing.get_args(literals[0])}
        values |= {"none": None} if may_be_none else {}
        return {"type": read_choice(values), "metavar": f"{{{','.join(values)}}}"}
    kinds = {float: (number, "X"), int: (read_whole_number, "N"), str: (str, "TEXT")}
    chosen = [kinds[kind] for kind in kinds if kind in options]
    convert, metavar = chosen[0] if chosen else (literal, "VALUE")
    return {"type": or_none(convert) if may_be_none else convert, "metavar": metavar}


def argument_texts(doc: str) -> dict[str, str]:
    """Returns the texts of a Google docstring's arguments by name, one line each."""
    heading = r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)*)"
    section = re.search(heading, doc, re.MULTILINE)
    if not section:
        return {}
    entries = re.findall(
        r"^    (\w+)(?: \([^)]*\))?: (.*(?:\n     +.*)*)", section[1], re.MULTILINE
    )
    return {name: " ".join(text.split()) for name, text in entries}
