"""The files of a checkpoint: each process writes the state of its own workers.

The file of a process, a shard, is an ordinary .npz, uncompressed, so that NumPy opens
it. Its entry `manifest`, JSON as bytes, describes own/0, own/1, …, shared/0, …. The
comment of the zip archive, which ends the file, is the SHA-256 of all bytes before it.

If workers span processes, each process names its own pieces of their arrays:
NAME@8,6@0:4,0:6 holds rows 0 to 3, columns 0 to 5, of an array of shape (8, 6).

A run may restore shards with another number of processes. Hosts need not share the
folder.
"""

import errno
import hashlib
import json
import math
import os
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from numpy.lib.format import read_array_header_1_0, read_magic

from experiments import files
from experiments.files import UNFINISHED, replacing
from syncalgos import HeldPart

Bounds = tuple[tuple[int, int], ...]  # for each axis, the first index and the end

VERSION = 1  # of the format
DIGEST = 64  # hexadecimal digits of a SHA-256
CHUNK = 1 << 20  # bytes
_PIECE = re.compile(r"(.*)@([\d,]+)@([\d:,]+)", re.DOTALL)

# NumPy's files lose these dtypes, so their bits are stored as unsigned integers.
FOREIGN = {
    np.dtype(x).name: np.dtype(x)
    for x in vars(ml_dtypes).values()
    if isinstance(x, type) and issubclass(x, np.generic)
}


class Damaged(Exception):
    """A shard cannot be used; the message is one line that names its file."""


class Incomplete(Exception):
    """Shards of a checkpoint are missing; the message is one line that names one."""


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
    with _open(path) as file:
        digest = _digest(file)
        # Covers the whole file: zip's own checksums miss a flipped bit in a header.
        if file.read() != digest:
            raise Damaged(
                f"{path.name} is damaged: its SHA-256 is not the one stored at its end"
            )
        shard = _parsed(path, file)
    named = parse_name(path.name)
    if named and named.step != shard.step:
        raise Damaged(f"{path.name} holds step {shard.step}, not {named.step}")
    return shard


def read_head(path: Path) -> Shard:
    """Reads a shard's manifest, which is small; its arrays are blank, without memory.

    Raises:
        Damaged: the file holds no manifest; its arrays may be damaged nevertheless.
        OSError: the file cannot be read.
    """
    with _open(path) as file:
        return _parsed(path, file, is_head=True)


def _open(path: Path) -> BinaryIO:
    """Opens the file of a shard; raises Damaged if it is a pipe or a device."""
    try:
        return files.open_regular(path)
    except files.Damaged as error:
        raise Damaged(str(error)) from error


def _parsed(path: Path, file: BinaryIO, is_head: bool = False) -> Shard:
    """Reads a shard; raises Damaged for any content that is none."""
    # Even a file that is not a shard may end with its own SHA-256.
    try:
        return _shard(_opened(file), is_head)
    except MemoryError:
        raise
    # zipfile and NumPy raise a dozen kinds of errors. Some are OSErrors that are not
    # disk errors, for example for a seek to before the file's beginning.
    except Exception as error:
        if getattr(error, "errno", None) not in (None, errno.EINVAL):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise Damaged(f"{path.name} is not usable: {reason}") from error


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


def _shard(entries: Mapping[str, np.ndarray], is_head: bool) -> Shard:
    """Reads a file's arrays; raises any kind of error if they are not a shard."""
    manifest = json.loads(entries["manifest"].tobytes())
    if manifest["version"] > VERSION:
        raise ValueError(
            f"its format is {manifest['version']}, but this version reads {VERSION}"
        )
    leaves: dict[str, dict[str, np.ndarray]] = {"own": {}, "shared": {}}
    for kind, named in leaves.items():
        for i, entry in enumerate(manifest[kind]):
            stored = None if is_head else entries[f"{kind}/{i}"]
            named[entry["name"]] = _leaf(stored, entry)
    if len(entries) != 1 + sum(map(len, leaves.values())):
        raise ValueError("it has arrays that its manifest does not list")
    numbers = (manifest[x] for x in ("step", "workers", "first"))
    shard = Shard(*numbers, **leaves, record=manifest["record"])
    _check(shard)
    return shard


def _leaf(stored: np.ndarray | None, entry: dict[str, Any]) -> np.ndarray:
    """Restores a leaf; a blank one, without memory, from its manifest entry alone.

    Raises:
        ValueError: it does not fit the entry.
    """
    dtype = FOREIGN.get(entry["dtype"]) or np.dtype(entry["dtype"])
    blank = np.broadcast_to(np.zeros((), dtype), entry["shape"])
    if stored is None:
        return blank
    shape = (1, *blank.shape[1:]) if entry["once"] else blank.shape
    if (stored.dtype, stored.shape) != (_stored_as(dtype, entry["name"]), shape):
        raise ValueError(f"its array {entry['name']!r} differs from its manifest")
    leaf = stored.view(dtype)
    return np.broadcast_to(leaf, blank.shape) if entry["once"] else leaf


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
    # Compared as integers: NaN is identical to itself, and 0 is not identical to -0.
    width = math.gcd(leaf.nbytes // len(leaf), 8)
    words = leaf.reshape(len(leaf), -1).view(f"u{width}")
    # Row by row: comparing whole leaves would need another copy of them.
    return all(np.array_equal(words[0], row) for row in words[1:])


def _digest(file: BinaryIO) -> bytes:
    """Returns the SHA-256 of all bytes before the stored digest; stops there."""
    left = file.seek(0, os.SEEK_END) - DIGEST
    file.seek(0)
    sha256 = hashlib.sha256()
    while left > 0 and (chunk := file.read(min(CHUNK, left))):
        sha256.update(chunk)
        left -= len(chunk)
    return sha256.hexdigest().encode()


def array_name(name: str) -> str:
    """Returns the name of the whole array, given its name or that of a piece."""
    piece = _PIECE.fullmatch(name)
    return piece[1] if piece else name


def named_pieces(name: str, x: np.ndarray | HeldPart) -> dict[str, np.ndarray]:
    """Names an array, or its pieces."""
    if not isinstance(x, HeldPart):
        return {name: np.asarray(x)}
    shape = ",".join(map(str, x.shape))

    def text(bounds: Bounds) -> str:
        return ",".join(f"{start}:{stop}" for start, stop in bounds)

    return {f"{name}@{shape}@{text(own)}": piece for own, piece in x.pieces.items()}


def find_bounds(index: Iterable[slice], shape: Iterable[int]) -> Bounds:
    """Returns the bounds of the piece of an array that a shard's index describes."""
    pairs = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in pairs)


def joined_pieces(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Joins pieces by name; an array that lacks pieces becomes a `HeldPart`."""
    found: dict[str, Any] = {}
    for name, x in arrays.items():
        if (piece := _PIECE.fullmatch(name)) is None:
            found[name] = x
            continue
        shape = tuple(map(int, piece[2].split(",")))
        pairs = (pair.split(":") for pair in piece[3].split(","))
        bounds = tuple((int(start), int(stop)) for start, stop in pairs)
        others = found[piece[1]].pieces if piece[1] in found else {}
        found[piece[1]] = HeldPart(shape, x.dtype, {**others, bounds: x})
    return {k: x.joined if isinstance(x, HeldPart) else x for k, x in found.items()}


def steps(folder: Path) -> list[int]:
    """Returns the steps of all checkpoints in a folder, the newest first.

    Only the files' names are read: a checkpoint may still be incomplete or damaged.
    """
    return sorted({name.step for name in _shard_names(folder)}, reverse=True)


def load(
    folder: Path,
    step: int,
    wanted: Callable[[int], range] = range,
    check: Callable[[Shard], object] = lambda head: None,
) -> Shard:
    """Loads workers of a checkpoint, from as few shards as hold them.

    Args:
        folder: the folder of the checkpoints.
        step: one of `steps`.
        wanted: maps the number of workers of the checkpoint to the numbers of those to
            load, at least one; by default all.
        check: raises a ValueError for the head of a shard that cannot be used.

    Returns:
        A shard of these workers, with new arrays. Its shared arrays and record may
        come from any shard, because all shards belong to one run. If a step exists in
        several layouts (0-of-1; 0-of-2 and 1-of-2), the first usable layout is loaded;
        complete layouts are tried first.

    Raises:
        Damaged: a needed shard is damaged, or does not fit the others.
        Incomplete: needed shards are missing.
        OSError: a file cannot be read.
    """
    layouts: dict[int, list[ShardName]] = defaultdict(list)
    for name in _shard_names(folder):
        if name.step == step:
            layouts[name.of].append(name)
    errors: list[Exception] = []
    # A killed run with another number of processes may have left an incomplete layout.
    for of in sorted(layouts, key=lambda of: (len(layouts[of]) < of, of)):
        try:
            return _load_layout(folder, layouts[of], wanted, check)
        except (Damaged, Incomplete) as error:
            errors.append(error)
    raise errors[0] if errors else Incomplete(f"step-{step:08} has no shard files")


def _load_layout(
    folder: Path,
    names: list[ShardName],
    wanted: Callable[[int], range],
    check: Callable[[Shard], object],
) -> Shard:
    """Loads workers from the shards that hold them, as their manifests say."""
    found = {name: _head(folder / name.file_name) for name in names}
    heads = {name: head for name, head in found.items() if head is not None}
    known = [*heads.values()]
    rows = wanted(known[0].workers) if known else range(1)
    is_whole = all(any(row in head.held for head in known) for row in rows)
    # Workers that span processes are held in pieces, which any file may have.
    is_spread = any(array_name(x) != x for head in known for x in head.own)
    if is_spread or not is_whole:
        for name in sorted(found.keys() - heads.keys()):
            read(folder / name.file_name)  # raises the reason
    if not is_whole:
        raise _incomplete(names)
    needed = {
        name: head
        for name, head in heads.items()
        if head.first < rows.stop and rows.start < head.held.stop
    }
    _check_fit(needed, check)
    return _joined((read(folder / name.file_name) for name in needed), rows)


def _check_fit(heads: dict[ShardName, Shard], check: Callable[[Shard], object]) -> None:
    """Raises Damaged for a shard that cannot be used, or is of another run."""
    first = next(iter(heads))
    expected = _common(heads[first])
    for name, head in heads.items():
        try:
            check(head)
        except ValueError as error:
            raise Damaged(f"{name.file_name} is not usable: {error}") from error
        found = _common(head)
        if differing := [x for x in expected if found[x] != expected[x]]:
            raise Damaged(
                f"{name.file_name} is of another run than {first.file_name}: its "
                f"{differing[0]} differ"
            )


def _joined(shards: Iterable[Shard], rows: range) -> Shard:
    """Joins the rows of shards that hold all of them."""
    by_first: dict[int, Shard] = {}
    for shard in shards:
        # Shards with the same first worker hold pieces of workers that span processes.
        other = by_first.setdefault(shard.first, shard)
        if other is not shard:
            other.own.update(shard.own)
            other.shared.update(shard.shared)
            shard.own.clear()  # so that `other` alone holds them
    parts = [by_first[first] for first in sorted(by_first)]
    cuts = [slice(max(rows.start - x.first, 0), rows.stop - x.first) for x in parts]
    # Leaf by leaf, to free each one: two copies of the state may not fit in memory.
    own = {
        name: np.concatenate(
            [x.own.pop(name)[cut] for x, cut in zip(parts, cuts, strict=True)]
        )
        for name in list(parts[0].own)
    }
    return parts[0]._replace(first=rows.start, own=own)


def _incomplete(names: list[ShardName]) -> Incomplete:
    """Reports which shards of a checkpoint are missing, given the existing ones."""
    step, _, num_files = names[0]
    num_missing = num_files - len(names)
    if num_missing == 0:
        return Incomplete(f"{names[0].file_name} and the others lack some workers")
    gaps = (number for number, name in enumerate(names) if name.number != number)
    missing_name = ShardName(step, next(gaps, len(names)), num_files).file_name
    if num_missing == 1:
        return Incomplete(f"{missing_name} is missing")
    return Incomplete(
        f"{missing_name} is missing, and {num_missing - 1} more of {num_files} files"
    )


def prune(
    folder: Path,
    keep: int,
    number: int,
    of: int,
    newest: int | None = None,
    run_ids: Collection[str | None] | None = None,
    best: int | None = None,
) -> None:
    """Removes a process's shards of old checkpoints, and its unfinished file.

    Args:
        folder: the folder of the checkpoints.
        keep: the number of newest steps to keep; 0 removes all.
        number: the number of the process's shards.
        of: the number of shards.
        newest: the step that was written or restored last. Newer steps are kept; they
            could not be restored. None means that there are no newer steps.
        run_ids: ids of the runs whose shards may be removed; see `remove`.
        best: a step to keep even if it is old.

    Raises:
        OSError: a file cannot be removed.
    """
    # Includes steps of damaged checkpoints: only the file names are known here.
    found = [x for x in steps(folder) if newest is None or x <= newest]
    remove(folder, [x for x in found[keep:] if x != best], number, of, run_ids)
    for name in _file_names(folder):
        owner = writer(name)
        if owner and (owner[0] == number or owner[1] != of):
            (folder / name).unlink(missing_ok=True)


def remove(
    folder: Path,
    steps: Collection[int],
    number: int,
    of: int,
    run_ids: Collection[str | None] | None = None,
) -> None:
    """Removes a process's shards of checkpoints, and those of other layouts.

    Shards written with another number of processes are removed too: no run with that
    number is active now.

    Args:
        folder: the folder of the checkpoints.
        steps: the steps of the checkpoints to remove.
        number: the number of the process's shards.
        of: the number of shards.
        run_ids: ids of the runs whose shards are removed, as their records name them. A
            shard with an unreadable record is kept. None removes shards of all runs,
            including damaged shards.

    Raises:
        OSError: a file cannot be removed.
    """
    for name in _shard_names(folder):
        path = folder / name.file_name
        if name.step not in steps or (name.number != number and name.of == of):
            continue
        head = None if run_ids is None else _head(path)
        if run_ids is None or (head and head.record.get("run_id") in run_ids):
            path.unlink(missing_ok=True)


def _head(path: Path) -> Shard | None:
    """Returns the head of a shard; None if it cannot be read."""
    try:
        return read_head(path)
    except (Damaged, OSError):
        return None


def is_first_save(folder: Path) -> bool:
    """Whether the folder holds only shards of an interrupted first save."""
    names = _shard_names(folder)
    counts = Counter(name.of for name in names)
    if len({name.step for name in names}) > 1 or any(x == n for x, n in counts.items()):
        return False
    try:
        heads = [read_head(folder / name.file_name) for name in names]
        return all(head.record["progress"]["saved"] == 0 for head in heads)
    except (Damaged, OSError, LookupError, TypeError):
        return False


def identity(shard: Shard) -> dict[str, Any]:
    """Returns the values that all shards of a checkpoint have in common.

    Records of earlier versions lack the ids of the run and of its start.
    """
    names = ("run_id", "start_id", "settings")
    return {"workers": shard.workers, **{x: shard.record.get(x) for x in names}}


def _common(shard: Shard) -> dict[str, Any]:
    """Returns `identity`, and the arrays' dtypes and shapes without their rows."""
    arrays = [
        (rows, array_name(name), x.dtype, array_name(name) == name and x.shape[rows:])
        for rows, part in enumerate((shard.shared, shard.own))  # axes of rows
        for name, x in part.items()
    ]
    return {**identity(shard), "arrays": {*arrays}}


def _shard_names(folder: Path) -> list[ShardName]:
    """Returns the names of the shards in a folder, in order."""
    return sorted(name for name in map(parse_name, _file_names(folder)) if name)


def _file_names(folder: Path) -> list[str]:
    """Returns the names of a folder's files; none if the folder is missing."""
    try:
        with os.scandir(folder) as found:
            # A broken link, or one to itself, still counts as the name of a file.
            return [x.name for x in found if x.is_symlink() or x.is_file()]
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return []
