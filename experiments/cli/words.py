"""Words of a command line: cleaned, and read as values."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from experiments.cli.errors import BadRequest
from syncalgos import checks

OF_WORKERS = ("devices", "lanes")  # the engine's names, which no axis in a worker has


SYNONYMS = {"--learning-rate": "--lr", "--epochs": "--steps"}


def nearest_flag(flag: str, flags: Iterable[str]) -> str:
    """Suggests the flag that was meant; "" if none is near."""
    if flag in SYNONYMS:
        return f": say {SYNONYMS[flag]}"
    return checks.nearest(flag, flags)


def cleaned(argv: Iterable[str]) -> list[str]:
    """Returns the words of a command line with dashes in the names of flags.

    Underscores are accepted, as Python has the names.

    Raises:
        BadRequest: an empty value, as left by an unset variable in a script, or what is
            no text in UTF-8, which no file could name.
    """
    # An empty word would become a name, a path or 0, far from where it was made.
    found, flag = [], ""
    for word in argv:
        if word.encode(errors="replace").decode() != word:
            raise BadRequest(f"{word!a} is no text in UTF-8: take another name")
        is_flag = word.startswith("--")
        name, equals, value = word.partition("=") if is_flag else (flag, "=", word)
        if equals and not value.strip():
            what = f"{name} {value!r}".strip()
            raise BadRequest(f"{what}: the value is empty, perhaps an unset variable")
        found.append(with_dashes(word))
        flag = name if is_flag else ""
    return found


def with_dashes(word: str) -> str:
    """Returns a flag with dashes in its name; other words as they are."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def _reader(convert: Callable[[str], Any], rule: str) -> Callable[[str], Any]:
    """Makes the reader of a word, whose errors say what it must be."""

    def read(text):
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}") from None

    return read


def one_of(values: Mapping[str, Any]) -> Callable[[str], Any]:
    """Makes the reader of a word that stands for one of these values."""

    def read(text):
        try:
            return values[checks.one_of("value", text, values)]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Makes a reader that takes the word none, too."""
    return lambda text: None if text.lower() == "none" else read(text)


whole = _reader(int, "a whole number")
number = _reader(float, "a number")
indices = _reader(
    lambda text: tuple(int(part) for part in text.split(",")),
    "indices with commas between them, such as 0,2,1",
)


def _axes(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    found = {name.strip(): int(size) for name, _, size in pairs}
    if len(found) < len(pairs) or not all(name.isidentifier() for name in found):
        raise ValueError
    return found


axes = _reader(
    _axes, "names and sizes of axes, each name once, such as fsdp=2,tensor=2"
)


def check_axes(label: str, sizes: Any) -> None:
    """Raises a ValueError unless these are sizes by the names of axes in a worker."""
    if not isinstance(sizes, Mapping) or not sizes:
        raise ValueError(f"{label} must hold sizes by axis, such as {{'fsdp': 2}}")
    for name, size in sizes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{label}: the name of an axis must be a word: {name!r}")
        if name in OF_WORKERS:
            raise ValueError(f"{label}: {name!r} is an axis of the workers: rename it")
        checks.whole(f"{label}: the size of {name}", size, least=1)


def literal(text: str) -> int | float | str:
    """Reads the value of a flag without a declared type: an int, a float, or text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def as_words(values: Mapping[str, Any]) -> list[str]:
    """Returns values by flag as a command line has them; a list repeats its flag."""
    words = []
    for flag, value in values.items():
        name = flag.replace("_", "-")
        switches = {"true": f"--{name}", "false": f"--no-{name}"}
        for text in map(_text, value if isinstance(value, list) else [value]):
            switch = switches.get(text.lower())
            words += [f"--{name}", text] if switch is None else [switch]
    return words


def _text(value: Any) -> str:
    """Returns a value as the reader of its flag takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, Mapping):
        return ",".join(f"{name}={size}" for name, size in value.items())
    return str(value)
