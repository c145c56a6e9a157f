"""JSON files, believed by their checksum; an error is one line that names the file."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SEAL = "sha256"


class Damaged(ValueError):
    """A file that is not as it was written; one line says why."""

    def __init__(self, path: Path | str, why: str):
        super().__init__(f"{path}: {why}")


def read(path: Path, *keys: str) -> dict[str, Any]:
    """Reads a file with a JSON object that has these keys.

    Raises:
        Damaged: it is missing, is no regular file, or holds something else.
        OSError: it cannot be read.
    """
    [content] = _parsed(path, [_text(path)])
    if missing := [key for key in keys if key not in content]:
        raise Damaged(path, f"it has no {missing[0]!r}")
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file with a JSON object in each line; raises the errors of `read`."""
    return _parsed(path, _text(path).splitlines())


def _text(path: Path) -> str:
    # It may be a pipe, from which a read might never return.
    if path.exists() and not path.is_file():
        raise Damaged(path, "it is not a regular file")
    try:
        return path.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(path, "it is missing") from None
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


def sealed(content: Mapping[str, Any], *beside: bytes) -> dict[str, Any]:
    """Returns content with a checksum of it and of the data beside it."""
    plain = {key: x for key, x in content.items() if key != SEAL}
    parts = [json.dumps(plain, sort_keys=True).encode(), *beside]
    return {**plain, SEAL: hashlib.sha256(b"\0".join(parts)).hexdigest()}


def check_seal(path: Path, content: Mapping[str, Any], *beside: bytes) -> None:
    """Raises a Damaged if content was changed; files of 0.2 have no checksum."""
    if content.get(SEAL) not in (None, sealed(content, *beside)[SEAL]):
        raise Damaged(path, "it, or a file beside it, was changed since it was written")
