"""The parts of checkpoints: files that each hold the workers of one process.

A part is an ordinary .npz, uncompressed, so that NumPy shows what is in it. Its entry
`manifest`, JSON as bytes, tells what own/0, own/1, …, shared/0, … are. The comment of
the zip archive, which ends the file, is the SHA-256 of all that comes before it.
"""

import hashlib
import json
import math
import os
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

VERSION = 1  # of the format
DIGEST = 64  # hexadecimal digits of a SHA-256
CHUNK = 1 << 20  # bytes

# NumPy's files lose these: their bits are stored as unsigned integers.
FOREIGN = {
    np.dtype(x).name: np.dtype(x)
    for x in vars(ml_dtypes).values()
    if isinstance(x, type) and issubclass(x, np.generic)
}


class Damaged(Exception):
    """A part cannot be used; the message is one line that names its file."""


class Part(NamedTuple):
    """What one process knows of a run.

    Attributes:
        step: local steps done.
        workers: of the whole run.
        first: the number of the first worker in this part.
        own: leaves (workers in this part, ...) by any name; at least one.
        shared: leaves of any shape that are the same for all workers, by name.
        record: what else to keep, as JSON has it.
    """

    step: int
    workers: int
    first: int
    own: dict[str, np.ndarray]
    shared: dict[str, np.ndarray]
    record: dict[str, Any]

    @property
    def held(self) -> range:
        """The numbers of the workers in this part."""
        return range(self.first, self.first + len(next(iter(self.own.values()))))


class Place(NamedTuple):
    """Which part a file is: of what step, its number from 0, of how many."""

    step: int
    number: int
    of: int

    @property
    def file_name(self) -> str:
        """As in step-00000032.0-of-1.npz."""
        return f"step-{self.step:08}.{self.number}-of-{self.of}.npz"


def place(file_name: str) -> Place | None:
    """Which part has this name; None: it is the name of none."""
    match = re.fullmatch(r"step-([0-9]+)\.([0-9]+)-of-([0-9]+)\.npz", file_name)
    found = Place(*map(int, match.groups())) if match else None
    # 00-of-1 is no name of ours, nor is 1-of-1.
    fits = found and found.number < found.of and found.file_name == file_name
    return found if fits else None


def unfinished_name(number: int, of: int) -> str:
    """Of the file that a process writes its next part to."""
    return f".{number}-of-{of}.unfinished"


def writer(file_name: str) -> tuple[int, int] | None:
    """The (number, of) whose unfinished file has this name; None: it is of none."""
    match = re.fullmatch(r"\.([0-9]+)-of-([0-9]+)\.unfinished", file_name)
    return (int(match[1]), int(match[2])) if match else None


def write(folder: Path, part: Part, number: int, of: int) -> Path:
    """Writes a part, so that a process killed at any moment leaves none that is torn.

    What it leaves then is an unfinished file, which the next `write` of this number
    replaces. Leaves whose rows are equal bit for bit are stored as one row.

    Args:
        folder: of the checkpoints; it is made.
        part: of the run.
        number: of the part, from 0: that of the process. No two processes that write
            to one folder have the same.
        of: parts in all.

    Returns:
        The file, which is on the disk, not only on its way there.

    Raises:
        OSError: it cannot be written; what was there before still is.
        TypeError: record holds what JSON cannot.
        ValueError: leaves that are not of numbers, or do not fit each other.
    """
    _check(part)
    if not 0 <= number < of:
        raise ValueError(f"there is no part {number} of {of}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / Place(part.step, number, of).file_name
    unfinished = folder / unfinished_name(number, of)
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("x+b") as file:
            with zipfile.ZipFile(file, "w") as archive:
                archive.comment = b"-" * DIGEST
                _fill(archive, part)
            digest = _digest(file)
            file.seek(-DIGEST, os.SEEK_END)
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    _sync(folder)
    return path


def read(path: Path) -> Part:
    """Reads a part.

    Args:
        path: of a file that `write` made, whatever its name is now.

    Returns:
        The part. Leaves that are stored as one row are read-only views of it.

    Raises:
        Damaged: it is not what was written, to the bit, or it is of another step than
            its name tells.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        digest = _digest(file)
        if file.read() != digest:
            raise Damaged(
                f"{path.name} is damaged: it has not the SHA-256 that it ends with"
            )
        try:
            with zipfile.ZipFile(file) as archive:
                part = _parse(archive)
        except MemoryError:
            raise
        except Exception as error:  # a file of anything may have its SHA-256 at its end
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise Damaged(f"{path.name} is not usable: {reason}") from error
    told = place(path.name)
    if told and told.step != part.step:
        raise Damaged(f"{path.name} is of step {part.step}, not {told.step}")
    return part


def _check(part: Part) -> None:
    """Raises a ValueError if numbers and leaves do not fit each other."""
    counts = {x.shape[:1] for x in part.own.values()}
    if len(counts) != 1 or counts == {()}:
        raise ValueError(f"own leaves must have one number of rows, not {counts}")
    if part.step < 0 or part.first < 0 or part.held.stop > part.workers:
        raise ValueError(
            f"workers {part.held} of {part.workers} at step {part.step} cannot be"
        )


def _fill(archive: zipfile.ZipFile, part: Part) -> None:
    manifest: dict[str, Any] = {
        "version": VERSION,
        "step": part.step,
        "workers": part.workers,
        "first": part.first,
        "record": part.record,
    }
    for kind, leaves in (("own", part.own), ("shared", part.shared)):
        told = manifest[kind] = []
        for name, leaf in leaves.items():
            leaf = np.asarray(leaf, order="C")
            stored = leaf.view(_stored_as(leaf.dtype, name))
            once = kind == "own" and _rows_are_equal(stored)
            _add(archive, f"{kind}/{len(told)}", stored[:1] if once else stored)
            facts = {"dtype": leaf.dtype.name, "shape": leaf.shape, "once": once}
            told.append({"name": name, **facts})
    _add(archive, "manifest", np.frombuffer(json.dumps(manifest).encode(), np.uint8))


def _add(archive: zipfile.ZipFile, entry: str, stored: np.ndarray) -> None:
    with archive.open(f"{entry}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, stored, allow_pickle=False)


def _parse(archive: zipfile.ZipFile) -> Part:
    """What is in an archive; raises anything if it is none of ours."""
    manifest = json.loads(_stored(archive, "manifest").tobytes())
    if manifest["version"] > VERSION:
        raise ValueError(
            f"it is of format {manifest['version']}, this version reads {VERSION}"
        )
    leaves = {
        kind: {
            told["name"]: _leaf(_stored(archive, f"{kind}/{i}"), told)
            for i, told in enumerate(manifest[kind])
        }
        for kind in ("own", "shared")
    }
    if len(archive.namelist()) != 1 + sum(map(len, leaves.values())):
        raise ValueError("it has entries that its manifest does not tell")
    numbers = (manifest[x] for x in ("step", "workers", "first"))
    part = Part(*numbers, **leaves, record=manifest["record"])
    _check(part)
    return part


def _stored(archive: zipfile.ZipFile, entry: str) -> np.ndarray:
    with archive.open(f"{entry}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _leaf(stored: np.ndarray, told: dict[str, Any]) -> np.ndarray:
    """The leaf that the manifest tells; raises a ValueError if it is another."""
    dtype = FOREIGN.get(told["dtype"]) or np.dtype(told["dtype"])
    shape = tuple(told["shape"])
    kept_as = _stored_as(dtype, told["name"])
    expected = (kept_as, (1, *shape[1:]) if told["once"] else shape)
    if (stored.dtype, stored.shape) != expected:
        raise ValueError(f"its array {told['name']!r} is not what its manifest tells")
    leaf = stored.view(dtype)
    return np.broadcast_to(leaf, shape) if told["once"] else leaf


def _stored_as(dtype: np.dtype, name: str) -> np.dtype:
    """The dtype of a leaf's entry; raises a ValueError for what is not of numbers."""
    if dtype.name in FOREIGN:
        return np.dtype(f"u{dtype.itemsize}")
    if dtype.kind not in "biufc" or not dtype.isnative:
        raise ValueError(f"{name!r} is of {dtype}, which cannot be stored")
    return dtype


def _rows_are_equal(leaf: np.ndarray) -> bool:
    """Whether there is more than one row and all have the same bits."""
    if len(leaf) < 2 or leaf.size == 0:
        return False
    row = leaf.nbytes // len(leaf)
    width = math.gcd(row, 8)
    words, row = leaf.reshape(-1).view(f"u{width}"), row // width
    after, before = words[row:], words[:-row]  # a row, and that before it
    return all(
        np.array_equal(after[i : i + CHUNK // width], before[i : i + CHUNK // width])
        for i in range(0, len(after), CHUNK // width)
    )


def _digest(file: BinaryIO) -> bytes:
    """The SHA-256 of a file but for the place at its end that it has; ends there."""
    left = file.seek(0, os.SEEK_END) - DIGEST
    file.seek(0)
    sha256 = hashlib.sha256()
    while left > 0 and (chunk := file.read(min(CHUNK, left))):
        sha256.update(chunk)
        left -= len(chunk)
    return sha256.hexdigest().encode()


def _sync(folder: Path) -> None:
    """Waits until a folder's names are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
