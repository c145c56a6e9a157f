"""Files that are whole or absent, and JSON that is believed by its checksum.

A file gets its name once it is complete on the disk. An error in a file's content is
one line that names the file.
"""

import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from experiments.command.errors import BadRequest, refusal, summarize_error

SEAL = "sha256"
CHANGED = "it, or a file beside it, was changed since it was written"
MOST_JSON = 1 << 30  # bytes; the longest that we have seen has a thousandth of them
# The ends of unfinished files' names; 0.3 did not draw them.
UNFINISHED = r"(?:(?:\.[0-9a-f]{8})?\.tmp|\.unfinished|\.syncalgos\.part)"


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
        raise Damaged(path, f"it cannot be used: {summarize_error(e)}") from e


def read(path: Path, *keys: str, beside: Iterable[Path] = ()) -> dict[str, Any]:
    """Reads a file with a JSON object that has these keys.

    The checksum is compared if the file has one.

    Args:
        path: the file.
        keys: keys that it must have.
        beside: files whose bytes the checksum covers, too.

    Raises:
        Damaged: a file is missing, is no regular file, holds something else, or was
            changed.
        OSError: a file cannot be read.
    """
    [content] = _objects(path, lambda text: [text])
    missing = [key for key in keys if key not in content]
    if missing:
        raise Damaged(path, f"it has no {missing[0]!r}")
    check_seal(path, content, *[_bytes(x) for x in beside])
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file with a JSON object in each line; raises the errors of `read`."""
    return _objects(path, str.splitlines)


def _objects(path: Path, split: Callable[[str], list[str]]) -> list[dict[str, Any]]:
    """Reads the JSON objects in a file, whose text is split into them."""
    try:
        objects = [json.loads(part) for part in split(_bytes(path).decode())]
    except UnicodeDecodeError:
        raise Damaged(path, "it is not valid UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"it is not valid JSON: {error}") from None
    if not all(isinstance(x, dict) for x in objects):
        raise Damaged(path, "it must hold an object")
    return objects


def open_regular(path: Path | str, most_bytes: int | None = None) -> BufferedReader:
    """Opens a file of the user's to read its bytes.

    All files that a user may have made are opened here: a read of a pipe may never
    return, and one of a device such as /dev/zero may never end. A link is followed.

    Args:
        path: the file.
        most_bytes: the largest size that it may have; None if that is not known.

    Raises:
        Damaged: it is not a regular file, or it is larger.
        IsADirectoryError: it is a folder.
        OSError: it cannot be opened.
    """
    # Without O_NONBLOCK, a pipe would be waited for here.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(path, "it is not a regular file")
        if most_bytes is not None and status.st_size > most_bytes:
            raise Damaged(
                path, f"it has {status.st_size} bytes, and may have {most_bytes}"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path | str, most_bytes: int | None = None) -> bytes:
    """Reads a file of the user's; raises the errors of `open_regular`."""
    with open_regular(path, most_bytes) as file:
        return file.read()


def _bytes(path: Path) -> bytes:
    """Reads a file of ours, which an error names."""
    try:
        return read_bytes(path, MOST_JSON)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(path, "it is missing") from None
    except IsADirectoryError:
        raise Damaged(path, "it is not a regular file") from None


def seal(content: Mapping[str, Any], *beside: bytes) -> dict[str, Any]:
    """Returns content with a checksum of it and of the data beside it.

    Args:
        content: the content in JSON's types, as it will be read.
        beside: the contents of other files.
    """
    plain = {key: x for key, x in content.items() if key != SEAL}
    parts = [json.dumps(plain, sort_keys=True).encode(), *beside]
    return {**plain, SEAL: hashlib.sha256(b"\0".join(parts)).hexdigest()}


def check_seal(path: Path, content: Mapping[str, Any], *beside: bytes) -> None:
    """Raises a Damaged if content, or data beside it, differs from its checksum."""
    try:
        expected = seal(content, *beside)
    except RecursionError as error:  # it is too deep to be written
        raise Damaged(path, CHANGED) from error
    if SEAL in content and content[SEAL] != expected[SEAL]:
        raise Damaged(path, CHANGED)


def json_lines(lines: Iterable[dict[str, Any]]) -> str:
    """Returns a text with a JSON object in each line."""
    return "".join(json.dumps(to_json_value(line)) + "\n" for line in lines)


def write_json(path: Path, content: dict[str, Any], *beside: Path) -> None:
    """Writes JSON with a checksum, so that a reader never sees half a file.

    Args:
        path: the file.
        content: the content.
        beside: files that the checksum covers, too.
    """
    # The checksum is of the content as it will be read.
    json_content = json.loads(json.dumps(to_json_value(content), default=repr))
    other_contents = [other_path.read_bytes() for other_path in beside]
    sealed_content = seal(json_content, *other_contents)
    write(path, json.dumps(sealed_content, indent=2) + "\n")


def write(path: Path, content: str | bytes) -> None:
    """Writes a file so that no reader sees half of it, even after a loss of power.

    Raises:
        OSError: it cannot be written; an earlier file is unchanged.
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, stem: str = "") -> Iterator[BinaryIO]:
    """Yields a new file that gets its name once it is complete on the disk.

    Args:
        path: the final path of the file.
        stem: the beginning of its name until then, the same for all files of one
            writer; by default the final name. What an earlier write with this stem left
            when it was killed is removed.

    Raises:
        OSError: it cannot be written, as the error says of this file.
    """
    stem = stem or f".{path.name}"
    # In the same folder, so on the same file system.
    unfinished = path.with_name(f"{stem}.{secrets.token_hex(4)}.tmp")
    try:
        # A new file by a name that nobody can foretell, or an error: a link in its
        # place would lead to a file of someone else.
        with unfinished.open("x+b") as file:
            try:
                _remove_older(unfinished, stem)
                yield file
                file.flush()
                # Otherwise the new name may reach the disk before the content.
                os.fsync(file.fileno())
                # Atomic: a reader finds the whole file or none.
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        if error.errno is not None:  # the text of others has no place for it
            error.filename = str(path)
            error.filename2 = None
        raise
    sync_folder(path.parent)


def _remove_older(unfinished: Path, stem: str) -> None:
    """Removes what killed writers of this stem and this user left."""
    user = unfinished.stat().st_uid
    with suppress(OSError):  # a folder may be closed to readers
        for other in unfinished.parent.iterdir():
            is_left = re.fullmatch(re.escape(stem) + UNFINISHED, other.name)
            if is_left and other != unfinished and other.lstat().st_uid == user:
                other.unlink()


def sync_folder(folder: Path) -> None:
    """Waits until a folder's entries are on the disk; a mere rename may be lost."""
    # The file is whole even where this fails: not every file system supports it, a
    # folder may be closed to readers, and Windows opens none.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def to_json_value(value: Any) -> Any:
    """Returns the value in JSON's types; a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {key: to_json_value(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(x) for x in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def refuse_os_errors(flag: str, path: Path) -> Iterator[None]:
    """Makes an OSError in the use of a flag's file or folder a `refusal`."""
    try:
        yield
    except OSError as error:
        raise refusal(error, f"{flag} {path}: {error.strerror}") from error


def try_to_write(out: Path) -> None:
    """Raises an OSError if no file can be written to a folder; leaves no file."""
    existing = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{existing} is a file, not a folder")
    # Permissions are not enough: root may write anywhere, but not in /proc.
    with make_folder(out):
        tempfile.TemporaryFile(dir=out).close()


@contextmanager
def make_folder(folder: Path) -> Iterator[None]:
    """Makes a folder if needed; removes new folders that stay empty."""
    missing = [x for x in (folder, *folder.absolute().parents) if not x.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):  # from the innermost outward, until one is not empty
            for new in missing:
                new.rmdir()
