"""JSON files, believed by their checksum; an error is one line that names the file."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.cli.errors import BadRequest, named

SEAL = "sha256"
CHANGED = "it, or a file beside it, was changed since it was written"


class Damaged(BadRequest):
    """A file that is not as it was written; one line says why."""

    def __init__(self, path: Path | str, why: str):
        super().__init__(f"{path}: {why}")


@contextmanager
def using(path: Path) -> Iterator[None]:
    """Makes any error in the use of a file's content a Damaged.

    Files of 0.3 may lack a checksum, and a user may edit them.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise Damaged(path, f"it cannot be used: {named(e)}") from e


def read(
    path: Path, *keys: str, beside: Iterable[Path] = (), seal: str = SEAL
) -> dict[str, Any]:
    """Reads a file with a JSON object that has these keys.

    Args:
        path: the file.
        keys: keys that it must have.
        beside: files whose bytes the checksum covers, too.
        seal: the key of the checksum, which is compared if the file has one.

    Raises:
        Damaged: a file is missing, is no regular file, holds something else, or was
            changed.
        OSError: a file cannot be read.
    """
    [content] = _parsed(path, [_text(path)])
    if missing := [key for key in keys if key not in content]:
        raise Damaged(path, f"it has no {missing[0]!r}")
    others = [_bytes(x) for x in beside]
    check_seal(path, content, *others, seal=seal)
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file with a JSON object in each line; raises the errors of `read`."""
    return _parsed(path, _text(path).splitlines())


def _bytes(path: Path) -> bytes:
    # It may be a pipe, from which a read might never return.
    if path.exists() and not path.is_file():
        raise Damaged(path, "it is not a regular file")
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(path, "it is missing") from None


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode()
    except UnicodeDecodeError:
        raise Damaged(path, "it is not valid UTF-8") from None


def _parsed(path: Path, texts: Iterable[str]) -> list[dict[str, Any]]:
    try:
        found = [json.loads(text) for text in texts]
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"it is not valid JSON: {error}") from None
    if not all(isinstance(x, dict) for x in found):
        raise Damaged(path, "it must hold an object")
    return found


def sealed(
    content: Mapping[str, Any], *beside: bytes, seal: str = SEAL
) -> dict[str, Any]:
    """Returns content with a checksum of it and of the data beside it.

    Args:
        content: the content in JSON's types, as it will be read.
        beside: the contents of other files.
        seal: the key of the checksum.
    """
    plain = {key: x for key, x in content.items() if key != seal}
    parts = [json.dumps(plain, sort_keys=True).encode(), *beside]
    return {**plain, seal: hashlib.sha256(b"\0".join(parts)).hexdigest()}


def check_seal(
    path: Path, content: Mapping[str, Any], *beside: bytes, seal: str = SEAL
) -> None:
    """Raises a Damaged if content, or data beside it, differs from its checksum."""
    try:
        found = sealed(content, *beside, seal=seal)
    except RecursionError as error:  # it is too deep to be written
        raise Damaged(path, CHANGED) from error
    if seal in content and content[seal] != found[seal]:
        raise Damaged(path, CHANGED)
