"""The command line: common flags, and the flags of an algorithm and of a task."""

import argparse
import os
import shutil
import textwrap
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import syncalgos
from experiments.command.errors import BadRequest, refusing
from experiments.command.factories import (
    ALGORITHM,
    TASK,
    Factory,
    FactoryKind,
    describe_factory,
)
from experiments.command.settings import MOST_CHOICES, FlagSetting, read_settings
from experiments.command.words import as_words, clean_words, nearest_flag

PROGRAM = "python -m experiments.run"
PAPER = "paper"  # the preset with the values of an algorithm's paper
Config = typing.TypeVar("Config")


class Parser(argparse.ArgumentParser):
    """A parser that raises a BadRequest for an error."""

    def error(self, message: str) -> typing.NoReturn:
        raise BadRequest(message)


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps texts at spaces alone, so that names such as tune-seeds stay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Show(argparse.Action):
    """Prints a text and ends the program."""

    def __init__(self, option_strings, dest, text: Callable[[], str], help: str):
        super().__init__(option_strings, dest, nargs=0, help=help)
        self.text = text

    def __call__(self, parser, namespace, values, option_string=None):
        # Imports rich, which a bad request does not need.
        from experiments.command import terminal

        terminal.show(self.text())
        parser.exit()


def parse_flags(
    argv: Sequence[str],
    config: type[Config],
    basic: Collection[str],
    factories: Sequence[Factory] | None = None,
) -> Config:
    """Reads the command line of a run; --help, --list and --version print and exit.

    --help shows the flags that are needed most, and those of a named algorithm or task;
    --help-all shows all flags. Everything that can be checked without jax is checked
    here. jax is not imported, unless the user's own module imports it.

    Args:
        argv: the flags.
        config: the dataclass whose fields are the common flags. It also has the fields
            `arguments`, for the algorithm, and `task_arguments`.
        basic: the fields that are needed most.
        factories: the algorithm and the task, if Python code passed one of them.

    Raises:
        BadRequest: one line says what was wrong and what is possible.
    """
    words = clean_words(argv)
    settings = read_settings(config)
    own_factories = [*(factories or _find_factories(words, settings))]
    if {"-h", "--help", "--help-all"} & {*words}:
        own_factories = [x for x in own_factories if _find_word(words, x.kind.flag)]
        shown_settings = (
            settings if "--help-all" in words else shorten_help(settings, basic)
        )
        make_parser(shown_settings, own_factories).parse_args(["--help"])
    parser = make_parser(settings, own_factories)
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        raise BadRequest(_explain_unknown(unknown[0], own_factories, parser))
    values = vars(namespace)
    algorithm, task = own_factories
    arguments = {
        "arguments": {name: values.pop(name) for name in algorithm.flags},
        "task_arguments": {name: values.pop(name) for name in task.flags},
    }
    return make_config(config, values, arguments)


def config_words(config: Any) -> list[str]:
    """Returns the flags of experiments.run that give a config, without --seed.

    Flags at their defaults are left out, except for the algorithm and the task.
    """
    return as_words(find_changed_values(config))


def find_changed_values(config: Any) -> dict[str, Any]:
    """Returns the values by flag that give a config of a run, without the seed.

    Those at their defaults are left out, except for the algorithm and the task.
    """
    changed: dict[str, Any] = {}
    for name, setting in read_settings(type(config)).items():
        value = getattr(config, name)
        is_name = name in (ALGORITHM.flag, TASK.flag)
        if is_name or (value != setting.default and name != "seed"):
            changed[name] = value
    arguments = config.arguments, config.task_arguments
    factories = describe_factories(config.algo, config.task, config.preset)
    for factory, values in zip(factories, arguments, strict=True):
        usual_items = factory.defaults.items()
        for item in values.items():
            if item not in usual_items:
                changed.update([item])
    return changed


def _find_word(words: Sequence[str], flag: str) -> str | None:
    """Returns the word of a flag that decides which other flags exist, if given."""
    flag_value = None
    for word, next_word in pairwise([*words, "--"]):
        name, equals, value = word.partition("=")
        if name == f"--{flag}" and (equals or not next_word.startswith("--")):
            flag_value = value if equals else next_word
    return flag_value


def shorten_help(
    settings: Mapping[str, FlagSetting], basic: Collection[str]
) -> dict[str, FlagSetting]:
    """Returns the basic settings, in one group and without long lists of choices."""
    basic_settings = {}
    for name, setting in settings.items():
        if name in basic:
            choices = setting.choices
            if len(choices) > MOST_CHOICES:
                choices = ()
            basic_settings[name] = setting._replace(group=None, choices=choices)
    return basic_settings


def _find_factories(
    words: Sequence[str], settings: Mapping[str, FlagSetting]
) -> list[Factory]:
    """Returns the algorithm and the task that a command line names, or the defaults."""
    algo, task = (_find_word(words, x) or settings[x].default for x in ("algo", "task"))
    return describe_factories(algo, task, _find_word(words, "preset"))


def describe_factories(algo: str, task: str, preset: str | None) -> list[Factory]:
    """Returns an algorithm and a task by their names; the preset may be PAPER.

    Raises:
        BadRequest: an unknown name, or a module that cannot be imported.
    """
    algorithm = describe_factory(ALGORITHM, algo)
    algorithm = algorithm.published() if preset == PAPER else algorithm
    return [algorithm, describe_factory(TASK, task)]


def parser_for(words: Sequence[str], config: type) -> Parser:
    """Returns the parser of a command line that is being written."""
    settings = read_settings(config)
    try:
        return make_parser(settings, _find_factories(words, settings))
    except BadRequest:  # a name that is not complete yet
        return make_parser(settings)


def complete(make_parser: Callable[[list[str]], argparse.ArgumentParser]) -> None:
    """Prints the possible next words and ends the process, if a shell asks for them.

    Args:
        make_parser: takes the words so far, and returns a parser with their flags.
    """
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(make_parser(os.environ["COMP_LINE"].split()))


def make_config(
    config: type[Config], values: Mapping[str, Any], own_arguments: Mapping[str, Any]
) -> Config:
    """Returns a config with a parser's values.

    Args:
        config: the type of the config.
        values: values by field; names that are not fields are ignored.
        own: values of fields that are not settings.

    Raises:
        BadRequest: a value is out of its range, or two values contradict each other.
    """
    fields = {name: values[name] for name in read_settings(config) if name in values}
    with refusing():
        return config(**fields, **own_arguments)


def make_parser(
    settings: Mapping[str, FlagSetting], own_factories: Sequence[Factory] = ()
) -> Parser:
    """Returns the parser of all flags, those of own_factories included."""
    see_also = None
    if not own_factories:
        see_also = (
            "Flags of an algorithm: --algo NAME --help; of a task: --task NAME --help"
        )
    parser = command_parser(
        PROGRAM,
        "[--algo NAME] [--task NAME] [flags]",
        "Train one model on many workers, synchronized by an algorithm.",
        see_also,
    )
    parser.add_argument(
        "--list",
        action=_Show,
        text=catalogue,
        help="show all algorithms and tasks, and exit",
    )
    add_settings(parser, settings.values())
    # A custom factory comes last, so that a clash of names is reported as its error.
    for factory in sorted(own_factories, key=lambda factory: ":" in factory.name):
        factory.add_flags(parser)
    return parser


def command_parser(
    prog: str, flags: str, about: str, epilog: str | None, has_help_all: bool = True
) -> Parser:
    """Makes the parser of a command, with --version.

    Args:
        prog: the command.
        flags: its flags in the line on its usage; "" leaves that line to argparse.
        about: what the command does.
        epilog: where there is more to read.
        has_help_all: whether --help-all is a flag, because --help shows some flags.
    """
    # No abbreviations: a new flag could change the meaning of an old command.
    usage = f"{prog} {flags}" if flags else None
    if usage and len(f"usage: {usage}") > shutil.get_terminal_size().columns:
        usage = f"{prog}\n       {flags}"
    parser = Parser(
        prog, usage, about, epilog, allow_abbrev=False, formatter_class=_HelpFormatter
    )
    if has_help_all:
        parser.add_argument("--help-all", action="help", help="show all flags and exit")
    parser.add_argument(
        "--version",
        action=_Show,
        text=lambda: f"syncalgos {syncalgos.__version__}",
        help="show the version, and exit",
    )
    return parser


def add_settings(
    parser: argparse.ArgumentParser, settings: Iterable[FlagSetting]
) -> None:
    """Adds flags in their groups."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for setting in settings:
        title = setting.group.title if setting.group else ""
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if setting.read is None:
            kind: dict[str, Any] = {"action": "store_true"}
        else:
            kind = {
                "type": setting.read,
                "default": setting.default,
                "metavar": setting.placeholder,
            }
            kind |= {"action": "append", "default": []} if setting.is_repeated else {}
        groups[title].add_argument(f"--{setting.name}", help=setting.help, **kind)


def catalogue() -> str:
    """Returns the output of --list: one line for each algorithm and each task."""
    # Imports rich, which a bad request does not need.
    from experiments.command.text_tables import terminal_width, wrap_text

    name_width = max(map(len, [*ALGORITHM.files, *TASK.files]))
    width = terminal_width()
    lines = []
    for kind in (ALGORITHM, TASK):
        lines.append(f"{kind.noun}s (--{kind.flag} NAME):")
        for name in kind.files:
            line = f"  {name:<{name_width}}  {describe_factory(kind, name).summary}"
            lines += wrap_text(line, width, " " * (name_width + 4))
    lines += wrap_text(f"To see the flags of one: {PROGRAM} --algo NAME --help", width)
    return "\n".join(lines)


def _explain_unknown(
    word: str, own_factories: Sequence[Factory], parser: Parser
) -> str:
    flag = word.partition("=")[0]
    if not flag.startswith("--"):
        return f"unexpected argument {word!r}"
    parameter = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
    for factory in own_factories:
        owners = find_owners(factory.kind, parameter)
        if owners:
            return (
                f"{factory.name} has no flag {flag}: it belongs to {', '.join(owners)}"
            )
    options = [*parser._option_string_actions]
    return f"unknown flag {flag!r}{nearest_flag(flag, options)} (see --help-all)"


def find_owners(kind: FactoryKind, parameter: str) -> list[str]:
    """Returns the registered algorithms, or tasks, that have this flag."""
    return [x for x in kind.files if parameter in describe_factory(kind, x).flags]
