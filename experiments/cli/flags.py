"""The command line: common flags, and an algorithm's and a task's own."""

import argparse
import tomllib
import typing
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.cli import factories, library
from experiments.cli.errors import BadRequest
from experiments.cli.factories import ALGORITHM, TASK, Factory, Kind
from experiments.cli.library import checks
from experiments.cli.signatures import Signature
from experiments.cli.words import cleaned
from experiments.tasks import TASKS
from experiments.training import bounds
from experiments.training.config import GROUPS, PAPER, Setting

PROGRAM = "python -m experiments.run"
DEFAULT_ALGORITHM = "bmuf"
DEFAULT_TASK = "digits"
PUBLISHED = Path(__file__).parent / "published.toml"


class Request(NamedTuple):
    """What the user asked for.

    Attributes:
        settings: the common flags.
        arguments: the algorithm's own flags.
        task_arguments: the task's own flags.
    """

    settings: Namespace
    arguments: dict[str, Any]
    task_arguments: dict[str, Any]


class Parser(argparse.ArgumentParser):
    """Tells what is wrong as a BadRequest."""

    def error(self, message: str) -> typing.NoReturn:
        raise BadRequest(message)


class _Show(argparse.Action):
    """Prints a text and ends the program."""

    def __init__(self, option_strings, dest, text: Callable[[], str], help: str):
        super().__init__(option_strings, dest, nargs=0, help=help)
        self.text = text

    def __call__(self, parser, namespace, values, option_string=None):
        from experiments.cli import (
            terminal,  # imports rich, which a bad request need not
        )

        terminal.show(self.text())
        parser.exit()


class Own(NamedTuple):
    """An algorithm or a task with flags of its own."""

    kind: Kind
    name: str
    signature: Signature

    def published(self) -> "Own":
        """The same with its source's values for defaults, as --preset paper asks."""
        values = tomllib.loads(PUBLISHED.read_text()).get(self.name, {})
        parameters = [
            p.replace(default=values.get(p.name, p.default))
            for p in self.signature.parameters
        ]
        return self._replace(signature=self.signature._replace(parameters=parameters))

    def take(self, known: Namespace) -> dict[str, Any]:
        """Moves its flags out of all that are known."""
        parameters = factories.flag_parameters(self.kind, self.signature)
        return {p.name: vars(known).pop(p.name) for p in parameters}


def parse(argv: Sequence[str]) -> Request:
    """Reads the command line; --help, --list and --version print and exit.

    What can be known without jax is refused here, and jax is not imported, unless a
    module of the user's own does.

    Raises:
        BadRequest: with one line that says what was wrong and what is possible.
    """
    words = cleaned(argv)
    early = _named(words)
    if early.help and early.algo is None and early.task is None:
        parser_of([]).parse_args(["--help"])
    if not early.help:
        check(parser_of([]).parse_known_args(words)[0])
    own = _own_of(early)
    parser = parser_of(own)
    known, unknown = parser.parse_known_args(words)
    if unknown:
        raise BadRequest(_explain_unknown(unknown[0], own, parser))
    algorithm, task = (each.take(known) for each in own)
    return Request(known, algorithm, task)


def _named(words: Sequence[str]) -> Namespace:
    """Reads what decides which other flags there are."""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--algo")
    first.add_argument("--task")
    first.add_argument("--preset")
    first.add_argument("-h", "--help", action="store_true")
    return first.parse_known_args(words)[0]


def _own_of(named: Namespace) -> list[Own]:
    algo = own_of(ALGORITHM, named.algo or DEFAULT_ALGORITHM)
    task = own_of(TASK, named.task or DEFAULT_TASK)
    return [algo.published() if named.preset == PAPER else algo, task]


def parser_for(words: Sequence[str]) -> Parser:
    """Returns the parser of a command line that is being written."""
    try:
        return parser_of(_own_of(_named(words)))
    except BadRequest:  # a name that is not whole yet
        return parser_of([])


def check(settings: Namespace) -> None:
    """Raises a BadRequest for a common flag that is out of its range."""
    try:
        bounds.check(settings)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def own_of(kind: Kind, name: str) -> Own:
    """Returns what an algorithm or a task has for itself.

    Raises:
        BadRequest: an unknown name, or a module that cannot be imported.
    """
    return Own(kind, name, factories.describe(kind, name))


def find(kind: Kind, name: str) -> Factory:
    """Returns the factory of an algorithm or a task.

    Raises:
        BadRequest: an unknown name, or a module that cannot be imported.
    """
    from syncalgos import ALGORITHMS  # imports jax

    known = ALGORITHMS if kind == ALGORITHM else TASKS
    return factories.find(kind, name, known)


def parser_of(own: Sequence[Own]) -> Parser:
    """Returns the parser of all flags, those of `own` included."""
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--algo NAME] [--task NAME] [flags]",
        allow_abbrev=False,
        description="Train one model on many workers that agree by an algorithm.",
        epilog=None
        if own
        else "Flags of an algorithm and of a task: "
        f"{PROGRAM} --algo NAME --task NAME --help",
    )
    add_version(parser)
    parser.add_argument(
        "--list",
        action=_Show,
        text=catalogue,
        help="show all algorithms and tasks, and exit",
    )
    for kind, default, text in (
        (ALGORITHM, DEFAULT_ALGORITHM, "how the workers agree"),
        (TASK, DEFAULT_TASK, "what is trained on what"),
    ):
        parser.add_argument(
            f"--{kind.flag}",
            metavar="NAME",
            default=default,
            help=f"{text}: {', '.join(kind.files)}, or your own as "
            f"package.module:factory (default: {default})",
        )
    add_settings(parser, GROUPS)
    for each in sorted(own, key=lambda each: ":" in each.name):  # it is blamed
        factories.add_flags(parser, *each)
    return parser


def add_version(parser: argparse.ArgumentParser) -> None:
    """Adds --version."""
    parser.add_argument(
        "--version", action=_Show, text=version, help="show the version, and exit"
    )


def add_settings(
    parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[Setting]]
) -> None:
    """Adds flags in their groups."""
    for title, settings in groups.items():
        group = parser.add_argument_group(title)
        for setting in settings:
            _add(group, setting)


def _add(group: argparse._ArgumentGroup, setting: Setting) -> None:
    flag = f"--{setting.name}"
    if setting.read is None:
        group.add_argument(flag, action="store_true", help=setting.help)
        return
    group.add_argument(
        flag,
        action="append" if setting.is_repeated else "store",
        type=setting.read,
        default=[] if setting.is_repeated else setting.default,
        metavar=setting.shown,
        help=setting.help,
    )


def version() -> str:
    """Returns the line that --version prints."""
    return f"syncalgos {library.version()}"


def catalogue() -> str:
    """Returns what --list prints: every algorithm and every task, in a line."""
    width = max(len(name) for kind in (ALGORITHM, TASK) for name in kind.files)
    lines = []
    for kind in (ALGORITHM, TASK):
        lines.append(f"{kind.noun}s (--{kind.flag} NAME):")
        for name in kind.files:
            summary = factories.describe(kind, name).doc.partition("\n")[0]
            lines.append(f"  {name:<{width}}  {summary}")
    return "\n".join([*lines, f"Flags of one: {PROGRAM} --algo NAME --help"])


def _explain_unknown(word: str, own: Sequence[Own], parser: Parser) -> str:
    flag = word.partition("=")[0]
    if not flag.startswith("--"):
        return f"unexpected argument {word!r}"
    parameter = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
    for kind, name, _ in own:
        if owners := owners_of(kind, parameter):
            return f"{name} has no flag {flag}: it belongs to {', '.join(owners)}"
    options = [option for action in parser._actions for option in action.option_strings]
    return f"unknown flag {flag!r}{checks.nearest(flag, options)} (see --help)"


def owners_of(kind: Kind, parameter: str) -> list[str]:
    """Returns the registered algorithms, or tasks, that have a flag of a name."""
    return [x for x in kind.files if parameter in factories.flag_names(kind, x)]
