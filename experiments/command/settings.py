"""Settings: the fields of a config that are flags.

Each command has one frozen dataclass, whose fields are made by `flag`. The parser, the
checks, config.json and --resume all read these fields, so that a new field is a new
flag.
"""

import dataclasses
import os
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, NamedTuple

from experiments.command.words import (
    axes,
    check_axes,
    indices,
    number,
    read_whole_number,
)
from syncalgos import checks

Scope = Literal["run", "start", "process"]

# The function that reads the word of a flag, by the type of its field. None means a
# switch, which takes no word.
READERS: dict[Any, Callable[[str], Any] | None] = {
    **{int: read_whole_number, float: number, str: str, Path: Path, bool: None},
    **{tuple[int, ...]: indices, Mapping[str, int]: axes},
    **{tuple[str, ...]: str, tuple[Path, ...]: Path},
}
REPEATED = tuple[str, ...], tuple[Path, ...]
MOST_CHOICES = 9  # in the placeholder of a flag
METAVARS: dict[Any, str] = {
    read_whole_number: "N",
    number: "X",
    Path: "PATH",
    axes: "AXIS=N,…",
}


class FlagGroup(NamedTuple):
    """Fields that --help shows together.

    Attributes:
        title: the title of the group; "" for flags without a group.
        scope: the scope of its fields, unless a field has its own (see `Setting`).
    """

    title: str = ""
    scope: Scope = "run"


class FlagSetting(NamedTuple):
    """A field of a config, as the command line knows it.

    Attributes:
        text: the meaning, as --help shows it.
        default: the default; None if something else decides.
        otherwise: a description of the default, if something else decides.
        group: the group that begins with this field; None continues the group of the
            field before.
        metavar: the placeholder that --help shows; "" derives it from `read`.
        choices: the allowed words; () means those of a Literal type, or any.
        least: the lowest number.
        above: an open lower bound.
        below: an open upper bound.
        scope: "run" if the value must not change when a run is resumed, because the
            numbers depend on it; "start" if each start may have another value;
            "process" if each process may have another value, too. None means the
            group's scope.
        parameter: the name of the field.
        read: converts a word to a value; None for a switch.
        is_repeated: whether the flag may be repeated; the value is a tuple.
    """

    text: str
    default: Any = None
    otherwise: str = ""
    group: FlagGroup | None = None
    metavar: str = ""
    choices: tuple[str, ...] = ()
    least: int | None = None
    above: float | None = None
    below: float | None = None
    scope: Scope | None = None
    parameter: str = ""
    read: Callable[[str], Any] | None = None
    is_repeated: bool = False

    @property
    def name(self) -> str:
        """The flag, without leading dashes."""
        return self.parameter.replace("_", "-")

    @property
    def placeholder(self) -> str:
        """The placeholder that --help shows for the word."""
        # A help page cannot wrap a placeholder: of many choices, the text has the list.
        if 0 < len(self.choices) <= MOST_CHOICES:
            return f"{{{','.join(self.choices)}}}"
        return self.metavar or METAVARS.get(self.read, "NAME")

    @property
    def help(self) -> str:
        """The meaning and the default, as --help shows them."""
        default = self.otherwise if self.default in (None, ()) else self.default
        text = self.text
        if len(self.choices) > MOST_CHOICES:
            text = f"{text}; one of {', '.join(self.choices)}"
        if self.read is None or default == "":
            return text
        return f"{text} (default: {default})"

    def check(self, value: Any) -> None:
        """Raises a ValueError unless the setting can have this value, or it is None."""
        if value is None:
            return
        label = f"--{self.name}"
        kind = bool if self.read is None else self.read
        if isinstance(kind, type) and not isinstance(value, kind):
            raise ValueError(
                f"{label} must be a {kind.__name__.lower()}, got {checks.shown(value)}"
            )
        bounds = {"least": self.least, "above": self.above, "below": self.below}
        if self.choices:
            checks.one_of(label, value, self.choices)
        elif self.read is read_whole_number:
            checks.whole(label, value, least=self.least or 0)
        elif self.read is axes:
            check_axes(label, value)
        elif self.read is indices:
            for index in value:
                checks.whole(label, index, least=0)
        if self.read is number or (
            self.read is read_whole_number and self.below is not None
        ):
            checks.real(label, value, **bounds)


def flag(*arguments: Any, **keywords: Any) -> Any:
    """Makes a field of a config, from the arguments of `Setting`."""
    setting = FlagSetting(*arguments, **keywords)
    return dataclasses.field(default=setting.default, metadata={"setting": setting})


count = partial(flag, least=1)
"""Makes a field of a config for a number of at least 1."""


def read_settings(config: type) -> dict[str, FlagSetting]:
    """Returns the settings of a config by the names of its fields, in their order."""
    settings = {}
    group = FlagGroup()
    for field in dataclasses.fields(config):
        setting = field.metadata.get("setting")
        if setting is None:
            continue
        is_union = typing.get_origin(field.type) in (typing.Union, UnionType)
        kind = typing.get_args(field.type)[0] if is_union else field.type
        is_literal = typing.get_origin(kind) is Literal
        group = setting.group or group
        settings[field.name] = setting._replace(
            group=group,
            choices=typing.get_args(kind) if is_literal else setting.choices,
            scope=setting.scope or group.scope,
            parameter=field.name,
            read=str if is_literal else READERS[kind],
            is_repeated=kind in REPEATED,
        )
    return settings


def to_plain_value(value: Any) -> Any:
    """Returns the number of a NumPy or jax scalar, and the text of a path.

    A mapping is frozen, as configs are.
    """
    if isinstance(value, Mapping):
        return MappingProxyType({key: to_plain_value(x) for key, x in value.items()})
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", 0) == 0
    return value.item() if is_scalar else value


def convert_values(settings: Mapping[str, FlagSetting], config: Any) -> None:
    """Makes a config's values those of its flags, such as paths of texts.

    Raises:
        ValueError: a setting is out of its range.
    """
    for name, setting in settings.items():
        value = getattr(config, name)
        is_tuple = setting.is_repeated or setting.read is indices
        if is_tuple and value is not None:
            if isinstance(value, str) or not isinstance(value, Iterable):
                value = [value]
            value = tuple(_convert(x, setting) for x in value)
        else:
            value = _convert(value, setting)
        object.__setattr__(config, name, value)  # it may be frozen
        if not setting.is_repeated:
            setting.check(value)


def _convert(value: Any, setting: FlagSetting) -> Any:
    """Returns a value in the type of its setting."""
    value = to_plain_value(value)
    return Path(value) if setting.read is Path and isinstance(value, str) else value
