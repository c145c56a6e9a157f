"""Settings: the fields of a config that are flags, described once for every reader.

A command has one frozen dataclass, whose fields are made by `flag`. The parser, the
checks, config.json and --resume read them there: a field is a flag by existing.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.cli.words import axes, check_axes, indices, number, whole
from syncalgos import checks

P = typing.ParamSpec("P")
Scope = Literal["run", "start", "process"]

# The type of a field says how its word is read, so that both cannot disagree.
# From a word to a value, by the type of a field; None is a switch, which takes no word.
READERS: dict[Any, Callable[[str], Any] | None] = {
    **{int: whole, float: number, str: str, Path: Path, bool: None},
    **{tuple[int, ...]: indices, Mapping[str, int]: axes},
}
REPEATED: dict[Any, Callable[[str], Any]] = {
    tuple[str, ...]: str,
    tuple[Path, ...]: Path,
}
METAVARS: dict[Any, str] = {whole: "N", number: "X", Path: "PATH", axes: "AXIS=N,…"}


class Group(NamedTuple):
    """Fields that --help shows together.

    Attributes:
        title: of the group; "" for the flags without one.
        scope: of its fields, unless they say otherwise (see `Setting`).
        study: likewise.
    """

    title: str = ""
    scope: Scope = "run"
    study: str = ""


class Setting(NamedTuple):
    """A field of a config, as the command line knows it.

    Attributes:
        text: its meaning, as --help shows it.
        default: None if something else decides.
        otherwise: what else decides, in words.
        group: the one that begins here; None stays in that of the field before.
        metavar: what --help shows for the word; "" follows from `read`.
        choices: the words that are allowed; () are those of a type Literal, or any.
        spellings: words of earlier versions, and what they are called now.
        least: the lowest number.
        above: an open lower bound.
        below: an open upper bound.
        scope: "run" if it must stay as it is when a run goes on, as the numbers depend
            on it; "start" if each start may have another; "process" if each process of
            a start may have its own, too. None is the group's.
        study: what a study offers in its place; "" if the runs of a study take it.
            None is the group's.
        parameter: the name of the field.
        read: from a word to a value; None for a switch.
        is_repeated: whether the flag may come several times; the value is a tuple.
    """

    text: str
    default: Any = None
    otherwise: str = ""
    group: Group | None = None
    metavar: str = ""
    choices: tuple[str, ...] = ()
    spellings: Mapping[str, str] = types.MappingProxyType({})
    least: int | None = None
    above: float | None = None
    below: float | None = None
    scope: Scope | None = None
    study: str | None = None
    parameter: str = ""
    read: Callable[[str], Any] | None = None
    is_repeated: bool = False

    @property
    def name(self) -> str:
        """The flag, without leading dashes."""
        return self.parameter.replace("_", "-")

    @property
    def shown(self) -> str:
        """The placeholder that --help shows for the word."""
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        return self.metavar or METAVARS.get(self.read, "NAME")

    @property
    def help(self) -> str:
        """The meaning and the default, as --help shows them."""
        default = self.otherwise if self.default in (None, ()) else self.default
        is_shown = self.read is not None and default != ""
        return self.text + (f" (default: {default})" if is_shown else "")

    def spelled(self, value: Any) -> Any:
        """Returns a parser's value as the config has it."""
        if self.is_repeated:
            return tuple(value)
        return self.spellings.get(value, value) if self.spellings else value

    def check(self, value: Any, label: str = "") -> None:
        """Raises a ValueError for a value that the setting cannot have; None is fine.

        Args:
            value: of the setting.
            label: its name in errors; "" is the flag.
        """
        label = label or f"--{self.name}"
        if value is None:
            return
        if self.choices:
            checks.one_of(label, value, self.choices)
        elif self.read is whole:
            checks.whole(label, value, least=self.least or 0)
            if self.below is not None:
                checks.real(label, value, least=self.least, below=self.below)
        elif self.read is number:
            checks.real(
                label, value, least=self.least, above=self.above, below=self.below
            )
        elif self.read is axes:
            check_axes(label, value)


def _as_field(describe: Callable[P, Setting]) -> Callable[P, Any]:
    """Returns the function that makes a dataclass field of what it is given."""

    def make(*arguments: P.args, **keywords: P.kwargs) -> Any:
        setting = describe(*arguments, **keywords)
        return dataclasses.field(default=setting.default, metadata={"setting": setting})

    return make


flag = _as_field(Setting)
"""Makes a field of a config; it takes what `Setting` takes."""


def settings_of(config: type) -> dict[str, Setting]:
    """Returns the settings of a config by the names of its fields, in their order."""
    found, group = {}, Group()
    for each in dataclasses.fields(config):
        if (setting := each.metadata.get("setting")) is None:
            continue
        is_union = typing.get_origin(each.type) in (typing.Union, types.UnionType)
        kind = typing.get_args(each.type)[0] if is_union else each.type
        is_literal = typing.get_origin(kind) is Literal
        group = setting.group or group
        found[each.name] = setting._replace(
            group=group,
            choices=typing.get_args(kind) if is_literal else setting.choices,
            scope=setting.scope or group.scope,
            study=group.study if setting.study is None else setting.study,
            parameter=each.name,
            read=str if is_literal else {**READERS, **REPEATED}[kind],
            is_repeated=kind in REPEATED,
        )
    return found


def checked(settings: Mapping[str, Setting], config: Any) -> None:
    """Raises a ValueError for the first setting that is out of its range."""
    for name, each in settings.items():
        if not each.is_repeated:
            each.check(getattr(config, name))
