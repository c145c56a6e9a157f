"""The command line: common flags, and an algorithm's and a task's own."""

import argparse
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import syncalgos
from experiments.cli.errors import BadRequest
from experiments.cli.factories import ALGORITHM, TASK, Factory, Kind, describe
from experiments.cli.settings import Setting, settings_of
from experiments.cli.words import as_words, cleaned, nearest_flag

PROGRAM = "python -m experiments.run"
PAPER = "paper"  # the preset of an algorithm's own flags
Config = typing.TypeVar("Config")


class Parser(argparse.ArgumentParser):
    """Raises a BadRequest for what is wrong."""

    def error(self, message: str) -> typing.NoReturn:
        raise BadRequest(message)


class _Show(argparse.Action):
    """Prints a text and ends the program."""

    def __init__(self, option_strings, dest, text: Callable[[], str], help: str):
        super().__init__(option_strings, dest, nargs=0, help=help)
        self.text = text

    def __call__(self, parser, namespace, values, option_string=None):
        # Imports rich, which a bad request need not.
        from experiments.cli import terminal

        terminal.show(self.text())
        parser.exit()


def parse(argv: Sequence[str], config: type[Config], basic: Collection[str]) -> Config:
    """Reads the command line of a run; --help, --list and --version print and exit.

    --help shows the flags that are needed most, and those of a named algorithm or task;
    --help-all shows all flags. What can be known without jax is refused here, and jax
    is not imported, unless a module of the user's own does.

    Args:
        argv: the flags.
        config: whose fields are the common flags; it has `arguments` of the algorithm
            and `task_arguments`, too.
        basic: the fields that are needed most.

    Raises:
        BadRequest: with one line that says what was wrong and what is possible.
    """
    words, settings = cleaned(argv), settings_of(config)
    named = _named(words)
    if named["help"] or named["help_all"]:
        own = [each for each in _own_of(named, settings) if named[each.kind.flag]]
        parser = parser_of(settings, own)  # refuses a flag that two have
        if not named["help_all"]:
            parser = parser_of(shortened(settings, basic), own)
        parser.parse_args(["--help"])
    # Common flags first: to look at others may import a module.
    made(config, vars(parser_of(settings).parse_known_args(words)[0]))
    own = _own_of(named, settings)
    parser = parser_of(settings, own)
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        raise BadRequest(_explain_unknown(unknown[0], own, parser))
    known = vars(namespace)
    algorithm, task = ({name: known.pop(name) for name in each.flags} for each in own)
    return made(config, known, {"arguments": algorithm, "task_arguments": task})


def words_of(config: Any) -> list[str]:
    """Returns the flags of experiments.run that say a config, without --seed.

    What has its default is left out, but for the algorithm and the task.
    """
    said = {
        name: value
        for name, each in settings_of(type(config)).items()
        if (value := getattr(config, name)) != each.default
        or name in (ALGORITHM.flag, TASK.flag)
    }
    said.pop("seed", None)
    given = config.arguments, config.task_arguments
    named = own_of(config.algo, config.task, config.preset)
    for own, values in zip(named, given, strict=True):
        undefined, defaults = object(), own.defaults
        said |= {k: x for k, x in values.items() if x != defaults.get(k, undefined)}
    return as_words(said)


def _named(words: Sequence[str]) -> dict[str, Any]:
    """Reads what decides which other flags there are."""
    # The factories' own flags are not known yet: all that is unknown passes.
    first = Parser(add_help=False, allow_abbrev=False)
    for flag in ("--algo", "--task", "--preset"):
        first.add_argument(flag)
    first.add_argument("-h", "--help", action="store_true")
    first.add_argument("--help-all", action="store_true")
    return vars(first.parse_known_args(words)[0])


def shortened(
    settings: Mapping[str, Setting], basic: Collection[str]
) -> dict[str, Setting]:
    """Returns some settings, as --help shows them: in one group, with few choices."""
    return {
        name: each._replace(
            group=None, choices=() if len(each.choices) > 9 else each.choices
        )
        for name, each in settings.items()
        if name in basic
    }


def _own_of(named: Mapping[str, Any], settings: Mapping[str, Setting]) -> list[Factory]:
    """Returns the algorithm and the task that are named, or the default ones."""
    algo, task = (named[kind] or settings[kind].default for kind in ("algo", "task"))
    return own_of(algo, task, named["preset"])


def own_of(algo: str, task: str, preset: str | None) -> list[Factory]:
    """Returns an algorithm and a task by their names; the preset may be PAPER.

    Raises:
        BadRequest: an unknown name, or a module that cannot be imported.
    """
    algorithm = describe(ALGORITHM, algo)
    algorithm = algorithm.published() if preset == PAPER else algorithm
    return [algorithm, describe(TASK, task)]


def parser_for(words: Sequence[str], config: type) -> Parser:
    """Returns the parser of a command line that is being written."""
    settings = settings_of(config)
    try:
        return parser_of(settings, _own_of(_named(words), settings))
    except BadRequest:  # a name that is not whole yet
        return parser_of(settings)


def made(
    config: type[Config],
    values: Mapping[str, Any],
    own: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """Returns a config of a parser's values.

    Args:
        config: its type.
        values: by field; others are left out.
        own: values of fields that are no settings.

    Raises:
        BadRequest: a value out of its range, or two that do not fit.
    """
    settings = settings_of(config)
    fields = {
        name: each.spelled(values[name])
        for name, each in settings.items()
        if name in values
    }
    try:
        return config(**fields, **own)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def parser_of(settings: Mapping[str, Setting], own: Sequence[Factory] = ()) -> Parser:
    """Returns the parser of all flags, those of `own` included."""
    # Abbreviations are off: a new flag would change what an old command means.
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--algo NAME] [--task NAME] [flags]",
        allow_abbrev=False,
        description="Train one model on many workers, synchronized by an algorithm.",
        epilog=None
        if own
        else "Flags of an algorithm: --algo NAME --help; of a task: --task NAME --help",
    )
    add_help_all(parser)
    add_version(parser)
    parser.add_argument(
        "--list",
        action=_Show,
        text=catalogue,
        help="show all algorithms and tasks, and exit",
    )
    add_settings(parser, settings.values())
    # A user's own factory comes last, and is blamed for a name that is taken.
    for each in sorted(own, key=lambda each: ":" in each.name):
        each.add_to(parser)
    return parser


def add_help_all(parser: argparse.ArgumentParser) -> None:
    """Adds --help-all to the parser of all flags."""
    parser.add_argument("--help-all", action="help", help="show all flags, and exit")


def add_version(parser: argparse.ArgumentParser) -> None:
    """Adds --version."""
    parser.add_argument(
        "--version",
        action=_Show,
        text=lambda: f"syncalgos {syncalgos.__version__}",
        help="show the version, and exit",
    )


def add_settings(parser: argparse.ArgumentParser, settings: Iterable[Setting]) -> None:
    """Adds flags in their groups."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for each in settings:
        title = each.group.title if each.group else ""
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if each.read is None:
            kind: dict[str, Any] = {"action": "store_true"}
        else:
            kind = {"type": each.read, "default": each.default, "metavar": each.shown}
            kind |= {"action": "append", "default": []} if each.is_repeated else {}
        groups[title].add_argument(f"--{each.name}", help=each.help, **kind)


def catalogue() -> str:
    """Returns what --list prints: every algorithm and every task, in a line."""
    width = max(len(name) for kind in (ALGORITHM, TASK) for name in kind.files)
    lines = []
    for kind in (ALGORITHM, TASK):
        lines.append(f"{kind.noun}s (--{kind.flag} NAME):")
        for name in kind.files:
            lines.append(f"  {name:<{width}}  {describe(kind, name).summary}")
    return "\n".join([*lines, f"Flags of one: {PROGRAM} --algo NAME --help"])


def _explain_unknown(word: str, own: Sequence[Factory], parser: Parser) -> str:
    flag = word.partition("=")[0]
    if not flag.startswith("--"):
        return f"unexpected argument {word!r}"
    parameter = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
    for each in own:
        if owners := owners_of(each.kind, parameter):
            return f"{each.name} has no flag {flag}: it belongs to {', '.join(owners)}"
    options = [option for action in parser._actions for option in action.option_strings]
    return f"unknown flag {flag!r}{nearest_flag(flag, options)} (see --help-all)"


def owners_of(kind: Kind, parameter: str) -> list[str]:
    """Returns the registered algorithms, or tasks, that have a flag of a name."""
    return [x for x in kind.files if parameter in describe(kind, x).flags]
