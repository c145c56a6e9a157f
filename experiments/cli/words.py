"""Words of a command line: cleaned, and read as values."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from experiments.cli.errors import BadRequest


def cleaned(argv: Iterable[str]) -> list[str]:
    """Returns the words of a command line with dashes in the names of flags.

    Underscores are accepted, as Python has the names.

    Raises:
        BadRequest: an empty value, as left by an unset variable in a script.
    """
    # An empty word would become a name, a path or 0, far from where it was made.
    found, flag = [], ""
    for word in argv:
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


whole = _reader(int, "a whole number")
number = _reader(float, "a number")
indices = _reader(
    lambda text: tuple(int(part) for part in text.split(",")),
    "indices with commas between them, such as 0,2,1",
)


def literal(text: str) -> int | float | str:
    """Reads the value of a flag without a declared type: an int, a float, or text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
