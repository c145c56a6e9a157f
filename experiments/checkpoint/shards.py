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


class DamagedShard(Exception):
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
    def own_workers(self) -> range:
        """The numbers of the workers in this shard."""
        return range(self.first, self.first + len(next(iter(self.own.values()))))


class ShardName(NamedTuple):
    """The step of a shard, its number from 0, and the number of shards."""

    step: int
    number: int
    num_shards: int

    @property
    def file_name(self) -> str:
        """The file's name, such as step-00000032.0-of-1.npz."""
        return f"step-{self.step:08}.{self.number}-of-{self.num_shards}.npz"


def parse_name(file_name: str) -> ShardName | None:
    """Parses a file's name; returns None if it is not the name of a shard."""
    match = re.fullmatch(r"step-([0-9]+)\.([0-9]+)-of-([0-9]+)\.npz", file_name)
    if match is None:
        return None
    step, number, num_files = match.groups()
    name = ShardName(int(step), int(number), int(num_files))
    # Rejects 00-of-1, 1-of-1, and steps that no run reaches.
    is_name = name.file_name == file_name and name.number < name.num_shards
    return name if is_name and name.step < 2**31 else None


def parse_unfinished_name(file_name: str) -> tuple[int, int] | None:
    """Parses an unfinished file's name to (number, of); returns None for others."""
    match = re.fullmatch(rf"\.([0-9]+)-of-([0-9]+){UNFINISHED}", file_name)
    return (int(match[1]), int(match[2])) if match else None


def write_shard(folder: Path, shard: Shard, number: int, num_shards: int) -> Path:
    """Writes a shard; a process killed at any moment leaves no partly written shard.

    A killed process leaves an unfinished file, which the next `write_shard` of this
    number replaces. Leaves whose rows are identical bit for bit are stored as one row.

    Args:
        folder: the folder of the checkpoints; it is created if missing.
        shard: the state to keep.
        number: the number of the process, from 0, which becomes that of the shard.
            Processes that write to one folder have different numbers.
        num_shards: the number of shards.

    Returns:
        The path of the file, which has reached the disk.

    Raises:
        OSError: the shard cannot be written; earlier files stay.
        TypeError: the record holds a value that JSON cannot represent.
        ValueError: leaves are not numeric, or do not fit each other.
    """
    _check_shard(shard)
    if not 0 <= number < num_shards:
        raise ValueError(f"number must be 0 to {num_shards - 1}, got {number}")
    entries = _make_entries(shard)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ShardName(shard.step, number, num_shards).file_name
    with replacing(path, f".{number}-of-{num_shards}") as file:
        np.savez(file, **entries)  # pyright: ignore[reportArgumentType]
        with zipfile.ZipFile(file, "a") as archive:
            archive.comment = b"-" * DIGEST  # space for the digest
        digest = _compute_digest(file)
        file.seek(-DIGEST, os.SEEK_END)
        file.write(digest)
    return path


def read_shard(path: Path) -> Shard:
    """Reads a shard.

    Args:
        path: the path of a file that `write_shard` made; it may have been renamed.

    Returns:
        The shard. Leaves that are stored as one row are read-only views of that row.

    Raises:
        DamagedShard: the content has changed, or the step differs from the file's name.
        OSError: the file cannot be read.
    """
    with _open_shard_file(path) as file:
        digest = _compute_digest(file)
        # Covers the whole file: zip's own checksums miss a flipped bit in a header.
        if file.read() != digest:
            raise DamagedShard(
                f"{path.name} is damaged: its SHA-256 is not the one stored at its end"
            )
        shard = _parse_shard(path, file)
    name = parse_name(path.name)
    if name and name.step != shard.step:
        raise DamagedShard(f"{path.name} holds step {shard.step}, not {name.step}")
    return shard


def read_head(path: Path) -> Shard:
    """Reads a shard's manifest, which is small; its arrays are blank, without memory.

    Raises:
        DamagedShard: the file holds no manifest; its arrays may be damaged even if it
            has one.
        OSError: the file cannot be read.
    """
    with _open_shard_file(path) as file:
        return _parse_shard(path, file, is_head=True)


def _open_shard_file(path: Path) -> BinaryIO:
    """Opens the file of a shard; raises DamagedShard if it is a pipe or a device."""
    try:
        return files.open_regular(path)
    except files.Damaged as error:
        raise DamagedShard(str(error)) from error


def _parse_shard(path: Path, file: BinaryIO, is_head: bool = False) -> Shard:
    """Reads a shard; raises DamagedShard for any content that is none."""
    # Even a file that is not a shard may end with its own SHA-256.
    try:
        return _build_shard(_open_arrays(file), is_head)
    except MemoryError:
        raise
    # zipfile and NumPy raise a dozen kinds of errors. Some are OSErrors that are not
    # disk errors, for example for a seek to before the file's beginning.
    except Exception as error:
        if getattr(error, "errno", None) not in (None, errno.EINVAL):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DamagedShard(f"{path.name} is not usable: {reason}") from error


def _open_arrays(file: BinaryIO) -> Mapping[str, np.ndarray]:
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


def _check_shard(shard: Shard) -> None:
    """Raises a ValueError if numbers and leaves do not fit each other."""
    if not isinstance(shard.record, dict):
        raise ValueError("its record is not a table of values")
    for number in (shard.step, shard.workers, shard.first):
        if type(number) is not int:
            raise ValueError(f"{number!r} is not a whole number")
    counts = {x.shape[:1] for x in shard.own.values()}
    if len(counts) != 1 or counts == {()}:
        raise ValueError(f"own leaves must have equally many rows, got {counts}")
    if shard.step < 0 or shard.first < 0 or shard.own_workers.stop > shard.workers:
        raise ValueError(
            f"impossible: workers {shard.own_workers} of {shard.workers}, step "
            f"{shard.step}"
        )


def _make_entries(shard: Shard) -> dict[str, np.ndarray]:
    """Returns a file's arrays: the leaves, and the manifest that describes them."""
    entries: dict[str, np.ndarray] = {}
    manifest = {"version": VERSION, **shard._asdict(), "own": [], "shared": []}
    for kind in ("own", "shared"):
        for i, (name, leaf) in enumerate(getattr(shard, kind).items()):
            leaf = np.asarray(leaf, order="C")
            stored_leaf = leaf.view(_find_stored_dtype(leaf.dtype, name))
            # After a sync of 256 workers this makes the file 256 times smaller.
            is_one_row = kind == "own" and _rows_are_identical(stored_leaf)
            entries[f"{kind}/{i}"] = stored_leaf[:1] if is_one_row else stored_leaf
            manifest[kind].append(
                {
                    "name": name,
                    "dtype": leaf.dtype.name,
                    "shape": leaf.shape,
                    "once": is_one_row,
                }
            )
    text = json.dumps(manifest).encode()
    return {**entries, "manifest": np.frombuffer(text, np.uint8)}


def _build_shard(entries: Mapping[str, np.ndarray], is_head: bool) -> Shard:
    """Reads a file's arrays; raises any kind of error if they are not a shard."""
    manifest = json.loads(entries["manifest"].tobytes())
    if manifest["version"] > VERSION:
        raise ValueError(
            f"its format is {manifest['version']}, but this version reads {VERSION}"
        )
    leaves: dict[str, dict[str, np.ndarray]] = {"own": {}, "shared": {}}
    for kind, leaves_by_name in leaves.items():
        for i, entry in enumerate(manifest[kind]):
            stored_leaf = None if is_head else entries[f"{kind}/{i}"]
            leaves_by_name[entry["name"]] = _restore_leaf(stored_leaf, entry)
    if len(entries) != 1 + sum(map(len, leaves.values())):
        raise ValueError("it has arrays that its manifest does not list")
    shard = Shard(
        step=manifest["step"],
        workers=manifest["workers"],
        first=manifest["first"],
        own=leaves["own"],
        shared=leaves["shared"],
        record=manifest["record"],
    )
    _check_shard(shard)
    return shard


def _restore_leaf(stored_leaf: np.ndarray | None, entry: dict[str, Any]) -> np.ndarray:
    """Restores a leaf; a blank one, without memory, from its manifest entry alone.

    Raises:
        ValueError: it does not fit the entry.
    """
    dtype = FOREIGN.get(entry["dtype"]) or np.dtype(entry["dtype"])
    blank = np.broadcast_to(np.zeros((), dtype), entry["shape"])
    if stored_leaf is None:
        return blank
    stored_shape = (1, *blank.shape[1:]) if entry["once"] else blank.shape
    stored_dtype = _find_stored_dtype(dtype, entry["name"])
    if stored_leaf.dtype != stored_dtype or stored_leaf.shape != stored_shape:
        raise ValueError(f"its array {entry['name']!r} differs from its manifest")
    leaf = stored_leaf.view(dtype)
    return np.broadcast_to(leaf, blank.shape) if entry["once"] else leaf


def _find_stored_dtype(dtype: np.dtype, name: str) -> np.dtype:
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


def _compute_digest(file: BinaryIO) -> bytes:
    """Returns the SHA-256 of all bytes before the stored digest; stops there."""
    num_bytes_left = file.seek(0, os.SEEK_END) - DIGEST
    file.seek(0)
    sha256 = hashlib.sha256()
    while num_bytes_left > 0:
        chunk = file.read(min(CHUNK, num_bytes_left))
        if not chunk:
            break
        sha256.update(chunk)
        num_bytes_left -= len(chunk)
    return sha256.hexdigest().encode()


def array_name(name: str) -> str:
    """Returns the name of the whole array, given its name or that of a piece."""
    piece = _PIECE.fullmatch(name)
    return piece[1] if piece else name


def name_pieces(name: str, x: np.ndarray | HeldPart) -> dict[str, np.ndarray]:
    """Names an array, or its pieces."""
    if not isinstance(x, HeldPart):
        return {name: np.asarray(x)}
    shape = ",".join(map(str, x.shape))

    def format_bounds(bounds: Bounds) -> str:
        return ",".join(f"{start}:{stop}" for start, stop in bounds)

    return {
        f"{name}@{shape}@{format_bounds(bounds)}": piece
        for bounds, piece in x.pieces.items()
    }


def find_bounds(index: Iterable[slice], shape: Iterable[int]) -> Bounds:
    """Returns the bounds of the piece of an array that a shard's index describes."""
    pairs = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in pairs)


def join_pieces(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Joins pieces by name; an array that lacks pieces becomes a `HeldPart`."""
    joined_arrays: dict[str, Any] = {}
    parts: dict[str, HeldPart] = {}
    for name, array in arrays.items():
        match = _PIECE.fullmatch(name)
        if match is None:
            joined_arrays[name] = array
            continue
        whole_name, shape_text, bounds_text = match.groups()
        shape = tuple(map(int, shape_text.split(",")))
        pairs = (pair.split(":") for pair in bounds_text.split(","))
        bounds = tuple((int(start), int(stop)) for start, stop in pairs)
        earlier_pieces = parts[whole_name].pieces if whole_name in parts else {}
        parts[whole_name] = HeldPart(
            shape, array.dtype, {**earlier_pieces, bounds: array}
        )
        joined_arrays[whole_name] = parts[whole_name]  # keeps its place in the order
    for name, part in parts.items():
        joined_arrays[name] = part.joined
    return joined_arrays


def find_steps(folder: Path) -> list[int]:
    """Returns the steps of all checkpoints in a folder, the newest first.

    Only the files' names are read: a checkpoint may still be incomplete or damaged.
    """
    return sorted({name.step for name in _shard_names(folder)}, reverse=True)


def load_workers(
    folder: Path,
    step: int,
    wanted_workers: Callable[[int], range] = range,
    check: Callable[[Shard], object] = lambda head: None,
) -> Shard:
    """Loads workers of a checkpoint, from as few shards as hold them.

    Args:
        folder: the folder of the checkpoints.
        step: one of `find_steps`.
        wanted_workers: maps the number of workers of the checkpoint to the numbers of
            those to load, at least one; by default all.
        check: raises a ValueError for the head of a shard that cannot be used.

    Returns:
        A shard of these workers, with new arrays. Its shared arrays and record may
        come from any shard, because all shards belong to one run. If a step exists in
        several layouts (0-of-1; 0-of-2 and 1-of-2), the first usable layout is loaded;
        complete layouts are tried first.

    Raises:
        DamagedShard: a needed shard is damaged, or does not fit the others.
        Incomplete: needed shards are missing.
        OSError: a file cannot be read.
    """
    layouts: dict[int, list[ShardName]] = defaultdict(list)
    for name in _shard_names(folder):
        if name.step == step:
            layouts[name.num_shards].append(name)
    errors: list[Exception] = []
    # A killed run with another number of processes may have left an incomplete layout.
    sizes = sorted(layouts, key=lambda size: (len(layouts[size]) < size, size))
    for num_shards in sizes:
        try:
            return _load_layout(folder, layouts[num_shards], wanted_workers, check)
        except (DamagedShard, Incomplete) as error:
            errors.append(error)
    raise errors[0] if errors else Incomplete(f"step-{step:08} has no shard files")


def _load_layout(
    folder: Path,
    names: list[ShardName],
    wanted_workers: Callable[[int], range],
    check: Callable[[Shard], object],
) -> Shard:
    """Loads workers from the shards that hold them, as their manifests say."""
    heads: dict[ShardName, Shard] = {}
    unreadable_names: list[ShardName] = []
    for name in names:
        head = _find_head(folder / name.file_name)
        if head is None:
            unreadable_names.append(name)
        else:
            heads[name] = head
    rows = range(1)
    if heads:
        rows = wanted_workers(next(iter(heads.values())).workers)
    present_workers: set[int] = set()
    for head in heads.values():
        present_workers.update(head.own_workers)
    is_whole = present_workers.issuperset(rows)
    # Workers that span processes are held in pieces, which any file may have.
    is_spread = any(_has_pieces(head) for head in heads.values())
    if is_spread or not is_whole:
        for name in sorted(unreadable_names):
            read_shard(folder / name.file_name)  # raises the reason
    if not is_whole:
        raise _missing_shards(names)
    needed_heads = {
        name: head
        for name, head in heads.items()
        if head.first < rows.stop and rows.start < head.own_workers.stop
    }
    _check_fit(needed_heads, check)
    shards = (read_shard(folder / name.file_name) for name in needed_heads)
    return _join_shards(shards, rows)


def _has_pieces(shard: Shard) -> bool:
    """Whether any array of the shard's workers is a piece of a larger one."""
    return any(array_name(name) != name for name in shard.own)


def _check_fit(heads: dict[ShardName, Shard], check: Callable[[Shard], object]) -> None:
    """Raises DamagedShard for a shard that cannot be used, or is of another run."""
    first_name = next(iter(heads))
    expected_values = _common_values(heads[first_name])
    for name, head in heads.items():
        try:
            check(head)
        except ValueError as error:
            raise DamagedShard(f"{name.file_name} is not usable: {error}") from error
        values = _common_values(head)
        for value_name, expected_value in expected_values.items():
            if values[value_name] != expected_value:
                raise DamagedShard(
                    f"{name.file_name} is of another run than {first_name.file_name}: "
                    f"its {value_name} differ"
                )


def _join_shards(shards: Iterable[Shard], rows: range) -> Shard:
    """Joins the rows of shards that hold all of them."""
    shards_by_first: dict[int, Shard] = {}
    for shard in shards:
        # Shards with the same first worker hold pieces of workers that span processes.
        earlier_shard = shards_by_first.setdefault(shard.first, shard)
        if earlier_shard is not shard:
            earlier_shard.own.update(shard.own)
            earlier_shard.shared.update(shard.shared)
            shard.own.clear()  # so that the earlier shard alone holds them
    ordered_shards = [shards_by_first[x] for x in sorted(shards_by_first)]
    # Leaf by leaf, to free each one: two copies of the state may not fit in memory.
    own_leaves: dict[str, np.ndarray] = {}
    for name in list(ordered_shards[0].own):
        blocks = []
        for shard in ordered_shards:
            start = max(rows.start - shard.first, 0)
            blocks.append(shard.own.pop(name)[start : rows.stop - shard.first])
        own_leaves[name] = np.concatenate(blocks)
    return ordered_shards[0]._replace(first=rows.start, own=own_leaves)


def _missing_shards(names: list[ShardName]) -> Incomplete:
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


def prune_shards(
    folder: Path,
    keep: int,
    number: int,
    num_shards: int,
    newest: int | None = None,
    run_ids: Collection[str | None] | None = None,
    best: int | None = None,
) -> None:
    """Removes a process's shards of old checkpoints, and its unfinished file.

    Args:
        folder: the folder of the checkpoints.
        keep: the number of newest steps to keep; 0 removes all.
        number: the number of the process's shards.
        num_shards: the number of shards.
        newest: the step that was written or restored last. Newer steps are kept; they
            could not be restored. None means that there are no newer steps.
        run_ids: ids of the runs whose shards may be removed; see `remove_shards`.
        best: a step to keep even if it is old.

    Raises:
        OSError: a file cannot be removed.
    """
    # Includes steps of damaged checkpoints: only the file names are known here.
    steps = [x for x in find_steps(folder) if newest is None or x <= newest]
    old_steps = [x for x in steps[keep:] if x != best]
    remove_shards(folder, old_steps, number, num_shards, run_ids)
    for file_name in _file_names(folder):
        writer = parse_unfinished_name(file_name)
        if writer is None:
            continue
        writer_number, num_writers = writer
        if writer_number == number or num_writers != num_shards:
            (folder / file_name).unlink(missing_ok=True)


def remove_shards(
    folder: Path,
    steps: Collection[int],
    number: int,
    num_shards: int,
    run_ids: Collection[str | None] | None = None,
) -> None:
    """Removes a process's shards of checkpoints, and those of other layouts.

    Shards written with another number of processes are removed too: no run with that
    number is active now.

    Args:
        folder: the folder of the checkpoints.
        steps: the steps of the checkpoints to remove.
        number: the number of the process's shards.
        num_shards: the number of shards.
        run_ids: ids of the runs whose shards are removed, as their records name them. A
            shard with an unreadable record is kept. None removes shards of all runs,
            including damaged shards.

    Raises:
        OSError: a file cannot be removed.
    """
    for name in _shard_names(folder):
        path = folder / name.file_name
        if name.step not in steps or (
            name.number != number and name.num_shards == num_shards
        ):
            continue
        head = None if run_ids is None else _find_head(path)
        if run_ids is None or (head and head.record.get("run_id") in run_ids):
            path.unlink(missing_ok=True)


def _find_head(path: Path) -> Shard | None:
    """Returns the head of a shard; None if it cannot be read."""
    try:
        return read_head(path)
    except (DamagedShard, OSError):
        return None


def is_first_save(folder: Path) -> bool:
    """Whether the folder holds only shards of an interrupted first save."""
    names = _shard_names(folder)
    counts = Counter(name.num_shards for name in names)
    has_several_steps = len({name.step for name in names}) > 1
    has_whole_layout = any(count == size for size, count in counts.items())
    if has_several_steps or has_whole_layout:
        return False
    try:
        heads = [read_head(folder / name.file_name) for name in names]
        return all(head.record["progress"]["saved"] == 0 for head in heads)
    except (DamagedShard, OSError, LookupError, TypeError):
        return False


def common_identity(shard: Shard) -> dict[str, Any]:
    """Returns the values that all shards of a checkpoint have in common.

    Records of earlier versions lack the ids of the run and of its start.
    """
    names = ("run_id", "start_id", "settings")
    return {"workers": shard.workers, **{x: shard.record.get(x) for x in names}}


def _common_values(shard: Shard) -> dict[str, Any]:
    """Returns `common_identity`, and arrays' dtypes and shapes without their rows."""
    arrays = set()
    for num_row_axes, leaves in enumerate((shard.shared, shard.own)):
        for name, leaf in leaves.items():
            whole_name = array_name(name)
            # Pieces of one array differ in shape.
            shape = leaf.shape[num_row_axes:] if whole_name == name else None
            arrays.add((num_row_axes, whole_name, leaf.dtype, shape))
    return {**common_identity(shard), "arrays": arrays}


def _shard_names(folder: Path) -> list[ShardName]:
    """Returns the names of the shards in a folder, in order."""
    return sorted(name for name in map(parse_name, _file_names(folder)) if name)


def _file_names(folder: Path) -> list[str]:
    """Returns the names of a folder's files; none if the folder is missing."""
    try:
        with os.scandir(folder) as entries:
            # A broken link or a pipe is refused when it is opened, and not left out.
            return [x.name for x in entries if not x.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return []
