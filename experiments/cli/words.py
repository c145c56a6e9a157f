"""Words of a command line: as they are cleaned, and as values."""

import argparse
from collections.abc import Iterable

from experiments.cli.errors import BadRequest


def cleaned(argv: Iterable[str]) -> list[str]:
    """Returns the words with flags as they are spelled, refusing those that are empty.

    A flag may be written with underscores, as Python has the name.

    Raises:
        BadRequest: an empty value, as an unset variable in a script leaves it.
    """
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
    """Returns a flag as it is spelled; other words as they are."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def whole(text: str) -> int:
    """Reads an int."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number, got {text!r}"
        ) from None


def number(text: str) -> float:
    """Reads a float."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def indices(text: str) -> tuple[int, ...]:
    """Reads device indices."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be indices with commas between them, such as 0,2,1, got {text!r}"
        ) from None


def literal(text: str) -> int | float | str:
    """Reads what a flag without a declared type most likely means."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
