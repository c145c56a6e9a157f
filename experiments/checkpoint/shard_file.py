"""The files of checkpoints; each file holds the workers of one process.

A shard is an ordinary .npz, uncompressed, so that NumPy opens it. Its entry `manifest`,
JSON as bytes, describes own/0, own/1, …, shared/0, …. The comment of the zip archive,
which ends the file, is the SHA-256 of all bytes before it.
"""

import errno
import hashlib
import json
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from numpy.lib.format import read_array_header_1_0, read_magic

from experiments.training.files import UNFINISHED, replacing

VERSION = 1  # of the format
DIGEST = 64  # hexadecimal digits of a SHA-256
CHUNK = 1 << 20  # bytes

# NumPy's files lose these dtypes, so their bits are stored as unsigned integers.
FOREIGN = {
    np.dtype(x).name: np.dtype(x)
    for x in vars(ml_dtypes).values()
    if isinstance(x, type) and issubclass(x, np.generic)
}


class Damaged(Exception):
    """A shard cannot be used; the message is one line that names its file."""


class Shard(NamedTuple):
    """The state of one process's workers.

    Attributes:
        step: local steps done.
        workers: the number of workers of the whole run.
        first: the number of the first worker in this shard.
        own: at least one leaf of shape (workers in this shard, ...), by name.
        shared: leaves of any shape that are the same for all workers, by name.
        record: other values to keep; they must fit JSON.
    """

    step: int
    workers: int
    first: int
    own: dict[str, np.ndarray]
    shared: dict[str, np.ndarray]
    record: dict[str, Any]

    @property
    def held(self) -> range:
        """The numbers of the workers in this shard."""
        return range(self.first, self.first + len(next(iter(self.own.values()))))


class ShardName(NamedTuple):
    """The step of a shard, its number from 0, and the number of shards."""

    step: int
    number: int
    of: int

    @property
    def file_name(self) -> str:
        """The file's name, such as step-00000032.0-of-1.npz."""
        return f"step-{self.step:08}.{self.number}-of-{self.of}.npz"


def parse_name(file_name: str) -> ShardName | None:
    """Parses a file's name; returns None if it is not the name of a shard."""
    match = re.fullmatch(r"step-([0-9]+)\.([0-9]+)-of-([0-9]+)\.npz", file_name)
    if match is None:
        return None
    found = ShardName(*map(int, match.groups()))
    # Rejects 00-of-1, 1-of-1, and steps that no run reaches.
    fits = found.file_name == file_name and found.number < found.of
    return found if fits and found.step < 2**31 else None


def writer(file_name: str) -> tuple[int, int] | None:
    """Parses an unfinished file's name to (number, of); returns None for others."""
    match = re.fullmatch(rf"\.([0-9]+)-of-([0-9]+){UNFINISHED}", file_name)
    return (int(match[1]), int(match[2])) if match else None


def write(folder: Path, shard: Shard, number: int, of: int) -> Path:
    """Writes a shard; a process killed at any moment leaves no partly written shard.

    A killed process leaves an unfinished file, which the next `write` of this number
    replaces. Leaves whose rows are identical bit for bit are stored as one row.

    Args:
        folder: the folder of the checkpoints; it is created if missing.
        shard: the state to keep.
        number: the number of the process, from 0, which becomes that of the shard.
            Processes that write to one folder have different numbers.
        of: the number of shards.

    Returns:
        The path of the file, which has reached the disk.

    Raises:
        OSError: the shard cannot be written; earlier files stay.
        TypeError: the record holds a value that JSON cannot represent.
        ValueError: leaves are not numeric, or do not fit each other.
    """
    _check(shard)
    if not 0 <= number < of:
        raise ValueError(f"number must be 0 to {of - 1}, got {number}")
    entries = _entries(shard)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ShardName(shard.step, number, of).file_name
    with replacing(path, f".{number}-of-{of}") as file:
        np.savez(file, **entries)  # pyright: ignore[reportArgumentType]
        with zipfile.ZipFile(file, "a") as archive:
            archive.comment = b"-" * DIGEST  # space for the digest
        digest = _digest(file)
        file.seek(-DIGEST, os.SEEK_END)
        file.write(digest)
    return path


def read(path: Path) -> Shard:
    """Reads a shard.

    Args:
        path: the path of a file that `write` made; the file may have been renamed.

    Returns:
        The shard. Leaves that are stored as one row are read-only views of that row.

    Raises:
        Damaged: the content has changed, or the step differs from the file's name.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        digest = _digest(file)
        # Covers the whole file: zip's own checksums miss a flipped bit in a header.
        if file.read() != digest:
            raise Damaged(
                f"{path.name} is damaged: its SHA-256 is not the one stored at its end"
            )
        # Even a file that is not a shard may end with its own SHA-256.
        with _of_any_content(path):
            shard = _parse(_opened(file))
    named = parse_name(path.name)
    if named and named.step != shard.step:
        raise Damaged(f"{path.name} holds step {shard.step}, not {named.step}")
    return shard


def read_record(path: Path) -> dict[str, Any]:
    """Reads only the record of a shard; the rest of the shard may be damaged.

    Raises:
        Damaged: the file holds no record.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file, _of_any_content(path):
        record = _manifest(_opened(file))["record"]
        if not isinstance(record, dict):
            raise ValueError("its record is not a table of values")
        return record


def _opened(file: BinaryIO) -> Mapping[str, np.ndarray]:
    """Opens a file's arrays; raises a ValueError if they claim more than it holds."""
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        if sum(x.file_size for x in archive.infolist()) > size:
            raise ValueError("its arrays claim to be larger than the file")
        for entry in archive.infolist():
            with archive.open(entry) as member:
                read_magic(member)
                shape, _, dtype = read_array_header_1_0(member)
                # NumPy would first make room for what the header claims.
                if member.tell() + math.prod(shape) * dtype.itemsize != entry.file_size:
                    raise ValueError(f"its array {entry.filename!r} has another size")
    file.seek(0)
    return np.load(file)


@contextmanager
def _of_any_content(path: Path) -> Iterator[None]:
    """Raises Damaged for any error of a parser, but not for disk errors."""
    try:
        yield
    except MemoryError:
        raise
    # zipfile and NumPy raise a dozen kinds of errors. Some are OSErrors that are not
    # disk errors, for example for a seek to before the file's beginning.
    except Exception as error:
        if getattr(error, "errno", None) not in (None, errno.EINVAL):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise Damaged(f"{path.name} is not usable: {reason}") from error


def _check(shard: Shard) -> None:
    """Raises a ValueError if numbers and leaves do not fit each other."""
    if not isinstance(shard.record, dict):
        raise ValueError("its record is not a table of values")
    for number in (shard.step, shard.workers, shard.first):
        if type(number) is not int:
            raise ValueError(f"{number!r} is not a whole number")
    counts = {x.shape[:1] for x in shard.own.values()}
    if len(counts) != 1 or counts == {()}:
        raise ValueError(f"own leaves must have equally many rows, got {counts}")
    if shard.step < 0 or shard.first < 0 or shard.held.stop > shard.workers:
        raise ValueError(
            f"impossible: workers {shard.held} of {shard.workers}, step {shard.step}"
        )


def _entries(shard: Shard) -> dict[str, np.ndarray]:
    """Returns a file's arrays: the leaves, and the manifest that describes them."""
    entries: dict[str, np.ndarray] = {}
    manifest = {"version": VERSION, **shard._asdict(), "own": [], "shared": []}
    for kind in ("own", "shared"):
        for i, (name, leaf) in enumerate(getattr(shard, kind).items()):
            leaf = np.asarray(leaf, order="C")
            stored = leaf.view(_stored_as(leaf.dtype, name))
            # After a sync of 256 workers this makes the file 256 times smaller.
            once = kind == "own" and _rows_are_identical(stored)
            entries[f"{kind}/{i}"] = stored[:1] if once else stored
            facts = {"dtype": leaf.dtype.name, "shape": leaf.shape, "once": once}
            manifest[kind].append({"name": name, **facts})
    text = json.dumps(manifest).encode()
    return {**entries, "manifest": np.frombuffer(text, np.uint8)}


def _parse(entries: Mapping[str, np.ndarray]) -> Shard:
    """Reads a file's arrays; raises any kind of error if they are not a shard."""
    manifest = _manifest(entries)
    if manifest["version"] > VERSION:
        raise ValueError(
            f"its format is {manifest['version']}, but this version reads {VERSION}"
        )
    leaves = {
        kind: {
            entry["name"]: _leaf(entries[f"{kind}/{i}"], entry)
            for i, entry in enumerate(manifest[kind])
        }
        for kind in ("own", "shared")
    }
    if len(entries) != 1 + sum(map(len, leaves.values())):
        raise ValueError("it has arrays that its manifest does not list")
    numbers = (manifest[x] for x in ("step", "workers", "first"))
    shard = Shard(*numbers, **leaves, record=manifest["record"])
    _check(shard)
    return shard


def _manifest(entries: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return json.loads(entries["manifest"].tobytes())


def _leaf(stored: np.ndarray, entry: dict[str, Any]) -> np.ndarray:
    """Restores a leaf; raises a ValueError unless it fits its manifest entry."""
    dtype = FOREIGN.get(entry["dtype"]) or np.dtype(entry["dtype"])
    shape = tuple(entry["shape"])
    kept_as = _stored_as(dtype, entry["name"])
    expected = (kept_as, (1, *shape[1:]) if entry["once"] else shape)
    if (stored.dtype, stored.shape) != expected:
        raise ValueError(f"its array {entry['name']!r} differs from its manifest")
    leaf = stored.view(dtype)
    return np.broadcast_to(leaf, shape) if entry["once"] else leaf


def _stored_as(dtype: np.dtype, name: str) -> np.dtype:
    """Returns the dtype in the file; raises a ValueError for non-numeric leaves."""
    if dtype.name in FOREIGN:
        return np.dtype(f"u{dtype.itemsize}")
    if dtype.kind not in "biufc" or not dtype.isnative:
        raise ValueError(f"{name!r} has dtype {dtype}, which cannot be stored")
    return dtype


def _rows_are_identical(leaf: np.ndarray) -> bool:
    """Whether there is more than one row and all have the same bits."""
    if len(leaf) < 2 or leaf.size == 0:
        return False
    row = leaf.nbytes // len(leaf)
    # Compared as integers: NaN is identical to itself, and 0 is not identical to -0.
    width = math.gcd(row, 8)
    words, row = leaf.reshape(-1).view(f"u{width}"), row // width
    after, before = words[row:], words[:-row]  # each row, and the row before it
    # Chunk by chunk: comparing whole leaves would need another copy of them.
    return all(
        np.array_equal(after[i : i + CHUNK // width], before[i : i + CHUNK // width])
        for i in range(0, len(after), CHUNK // width)
    )


def _digest(file: BinaryIO) -> bytes:
    """Returns the SHA-256 of all bytes before the stored digest; stops there."""
    left = file.seek(0, os.SEEK_END) - DIGEST
    file.seek(0)
    sha256 = hashlib.sha256()
    while left > 0 and (chunk := file.read(min(CHUNK, left))):
        sha256.update(chunk)
        left -= len(chunk)
    return sha256.hexdigest().encode()
