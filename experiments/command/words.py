"""Words of a command line: cleaned, and read as values."""

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.command.errors import BadRequest
from syncalgos import checks

OF_WORKERS = ("devices", "lanes")  # the engine's axes; --mesh may not use these names

# What to use in place of other programs' flags, and of those that a study sets itself.
_TEXTS = tomllib.loads(Path(__file__).with_name("instead.toml").read_text("utf-8"))
INSTEAD = _TEXTS["instead"]
REFUSED_FLAGS = _TEXTS["taken"]
RENAMED = _TEXTS["renamed"]  # ALGORITHM.ARGUMENT, as in files of 0.3


def nearest_flag(flag: str, flags: Iterable[str]) -> str:
    """Suggests what to use in place of a flag: the nearest one; "" if none is near."""
    if flag in INSTEAD:
        return f": {INSTEAD[flag]}"
    return checks.nearest(flag, flags)


def clean_words(argv: Iterable[str]) -> list[str]:
    """Returns the words of a command line with dashes in the names of flags.

    Underscores are accepted, as in the names of Python parameters.

    Raises:
        BadRequest: a value is empty, as left by an unset variable in a script, or is
            not valid UTF-8, or holds letters that the locale lacks.
    """
    # An empty value would cause an error much later, as a name or a path.
    dashed_words = []
    flag = ""
    for word in argv:
        if word.encode(errors="replace").decode() != word:
            raise _unreadable(word)
        is_flag = word.startswith("--")
        name, equals, value = word.partition("=") if is_flag else (flag, "=", word)
        if equals and not value.strip():
            setting = f"{name} {value!r}".strip()
            raise BadRequest(
                f"{setting}: the value is empty, perhaps an unset variable"
            )
        dashed_words.append(with_dashes(word))
        flag = name if is_flag else ""
    return dashed_words


def _unreadable(word: str) -> BadRequest:
    """Makes the error for a word that could not be read as text."""
    try:
        os.fsencode(word).decode()
    except UnicodeDecodeError:
        return BadRequest(f"{word!a} is not valid UTF-8: use another name")
    return BadRequest(
        f"{word!a} has letters that this locale lacks: set LC_ALL=C.UTF-8"
    )


def with_dashes(word: str) -> str:
    """Returns a flag with dashes in its name; other words unchanged."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def _reader(convert: Callable[[str], Any], rule: str) -> Callable[[str], Any]:
    """Makes a reader of words; its errors state the rule."""

    def read(text):
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}") from None

    return read


def read_choice(values: Mapping[str, Any]) -> Callable[[str], Any]:
    """Makes a reader that returns the value of one of these words."""

    def read(text):
        try:
            return values[checks.one_of("value", text, values)]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Makes a reader that also accepts the word none."""
    return lambda text: None if text.lower() == "none" else read(text)


read_whole_number = _reader(int, "a whole number")
number = _reader(float, "a number")
indices = _reader(
    lambda text: tuple(int(part) for part in text.split(",")),
    "indices separated by commas, such as 0,2,1",
)


def _axes(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    sizes = {name.strip(): int(size) for name, _, size in pairs}
    if len(sizes) < len(pairs) or not all(name.isidentifier() for name in sizes):
        raise ValueError
    return sizes


axes = _reader(
    _axes, "names and sizes of axes, each name once, such as fsdp=2,tensor=2"
)


def check_axes(label: str, sizes: Any) -> None:
    """Raises a ValueError unless this maps names of axes in a worker to sizes."""
    if not isinstance(sizes, Mapping) or not sizes:
        raise ValueError(f"{label} must map axes to sizes, such as {{'fsdp': 2}}")
    for name, size in sizes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{label}: axis {name!r} must be an identifier")
        if name in OF_WORKERS:
            raise ValueError(f"{label}: {name!r} is a reserved name: rename the axis")
        checks.whole(f"{label}: the size of {name}", size, least=1)


def literal(text: str) -> int | float | str:
    """Reads the value of a flag without a declared type as an int, a float or text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def as_words(values: Mapping[str, Any]) -> list[str]:
    """Returns a command line with these values by flag; a list repeats its flag."""
    words = []
    for flag, value in values.items():
        name = flag_name(flag)
        switches = {"true": [name], "false": [flag_name(f"no_{flag}")]}
        for text in map(_text, value if isinstance(value, list) else [value]):
            words += switches.get(text.lower(), [name, text])
    return words


def _text(value: Any) -> str:
    """Returns the text of a value, in the form that its flag accepts."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, Mapping):
        return ",".join(f"{name}={size}" for name, size in value.items())
    return str(value)


Words = tuple[str, ...]


def flag_groups(words: Sequence[str]) -> list[Words]:
    """Splits a command line before each flag: [("--lr", "0.1"), ("--nesterov",)]."""
    groups: list[Words] = []
    for word in words:
        if word.startswith("--"):
            groups.append((with_dashes(word),))
        elif groups:
            groups[-1] += (word,)
        elif "=" in word:
            raise BadRequest(
                f"unexpected argument {word!r}: put a label with spaces in quotes"
            )
        else:
            raise BadRequest(f"unexpected argument {word!r}: flags begin with --")
    return groups


def without(words: Sequence[str], parameters: Container[str]) -> list[str]:
    """Returns a command line without the flags of some parameters."""
    other_words: list[str] = []
    for group in flag_groups(words):
        if parameter(group[0]) not in parameters:
            other_words += group
    return other_words


def parameter(flag: str) -> str:
    """Returns the parameter that a flag sets: "--no-nesterov" -> "nesterov"."""
    name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
    return re.sub("^no_", "", name)


def flag_name(name: str) -> str:
    """Returns the flag of a parameter: "block_lr" -> "--block-lr"."""
    return f"--{name.replace('_', '-')}"
