"""The folder of a run's checkpoints: listing, loading and pruning.

Every process writes its own workers (see `shard_file`); a restoring run may have
another number of processes. Hosts may share the folder or not.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection
from itertools import count as counted
from pathlib import Path
from typing import Any

import numpy as np

from experiments.checkpoint import shard_file
from experiments.checkpoint.pieces import array_name
from experiments.checkpoint.shard_file import Damaged, Shard, ShardName

# Identical in the records of all shards of a checkpoint; earlier runs lack the ids.
COMMON = ("run_id", "start_id", "settings")


class Incomplete(Exception):
    """Shards of a checkpoint are missing; the message is one line that names one."""


def steps(folder: Path) -> list[int]:
    """The steps of all checkpoints in a folder, the newest first.

    Only the files' names are read: any checkpoint may prove incomplete or damaged.
    """
    return sorted({name.step for name in _shard_names(folder)}, reverse=True)


def load(
    folder: Path,
    step: int,
    first: int | None = None,
    count: int | None = None,
    check: Callable[[Shard], object] | None = None,
) -> Shard:
    """Loads workers of a checkpoint, whatever shards they are in.

    Args:
        folder: of the checkpoints.
        step: one of `steps`.
        first: the number of the first worker wanted; None: 0.
        count: workers wanted; None: all from `first` on.
        check: raises a ValueError for a shard that does not serve.

    Returns:
        A shard of those workers, in arrays of its own; shared and record are those of
        any shard, as all are of one run. If a step is there in several layouts (0-of-1;
        0-of-2 and 1-of-2), they are from the first that serves: complete ones come
        first.

    Raises:
        Damaged: a shard that is needed is, or does not fit the others.
        Incomplete: shards that are needed are missing.
        OSError: a file cannot be read.
    """
    found = [name for name in _shard_names(folder) if name.step == step]
    if not found:
        raise Incomplete(f"step-{step:08}: no part of it is there")
    layouts = [
        [name for name in found if name.of == of] for of in {x.of for x in found}
    ]
    # A killed run with another number of processes may have left an incomplete layout.
    errors = []
    for names in sorted(layouts, key=lambda x: (len(x) < x[0].of, x[0].of)):
        try:
            return _load_layout(folder, names, first or 0, count, check)
        except (Damaged, Incomplete) as error:
            errors.append(error)
    raise errors[0]


def prune(
    folder: Path,
    keep: int,
    number: int,
    of: int,
    newest: int | None = None,
    run_ids: Collection[str | None] | None = None,
) -> None:
    """Removes a process's shards of old checkpoints, and its unfinished file.

    Args:
        folder: of the checkpoints.
        keep: the newest steps to keep; 0 removes all. With 1, the other processes must
            have written theirs: until then the one before is the last complete one.
        number: of the process's shards.
        of: the number of shards.
        newest: the step that was written or restored last. Newer ones stay: none of
            them served. None: there are none.
        run_ids: as in `remove`.

    Raises:
        OSError: a file cannot be removed.
    """
    # Steps of complete and of damaged checkpoints alike: only names are known here.
    found = [x for x in steps(folder) if newest is None or x <= newest]
    for step in found[keep:]:
        remove(folder, step, number, of, run_ids)
    for name in _file_names(folder):
        writer = shard_file.writer(name)
        if writer and (writer[0] == number or writer[1] != of):
            (folder / name).unlink(missing_ok=True)


def remove(
    folder: Path,
    step: int,
    number: int,
    of: int,
    run_ids: Collection[str | None] | None = None,
) -> None:
    """Removes a process's shard of a checkpoint, and those of other layouts.

    Shards of runs with another number of processes count as its own: none of those is
    at work now.

    Args:
        folder: of the checkpoints.
        step: of the checkpoint.
        number: of the process's shards.
        of: the number of shards.
        run_ids: of the runs that have written them, by their records; a shard whose
            record cannot be read is left. None: of any run, damaged or not.

    Raises:
        OSError: a file cannot be removed.
    """
    for name in _shard_names(folder):
        path = folder / name.file_name
        is_ours = name.step == step and (name.number == number or name.of != of)
        if is_ours and (run_ids is None or _is_of(path, run_ids)):
            path.unlink(missing_ok=True)


def _is_of(path: Path, run_ids: Collection[str | None]) -> bool:
    """Whether one of these runs has written a shard, as far as it can be read."""
    try:
        return shard_file.read_record(path).get("run_id") in [*run_ids]
    except (Damaged, OSError):
        return False


def records_of_incomplete(folder: Path, step: int) -> list[dict[str, Any]]:
    """Reads the records of a checkpoint's shards, if no layout has all; else none.

    Raises:
        Damaged: a shard is.
        OSError: one cannot be read.
    """
    names = [name for name in _shard_names(folder) if name.step == step]
    if _is_complete(names):
        return []
    return [shard_file.read_record(folder / name.file_name) for name in names]


def _is_complete(names: list[ShardName]) -> bool:
    """Whether all shards of any layout are among those of a step."""
    counts = Counter(name.of for name in names)
    return any(count == of for of, count in counts.items())


def _load_layout(
    folder: Path,
    names: list[ShardName],
    first: int,
    count: int | None,
    check: Callable[[Shard], object] | None,
) -> Shard:
    """Loads workers from few shards: they are large, and a process needs not all."""
    of = names[0].of
    unread = {name.number: name for name in names}
    damage: Damaged | None = None
    taken: list[tuple[Shard, ShardName]] = []
    lacking, stop, is_lacking = first, first, True
    # Workers are split evenly as a rule, and those wanted are often one shard's.
    guess = first // count if count else 0
    while unread:
        name = unread.pop(min(unread, key=lambda x: abs(x - guess)))
        try:
            taken.append((_read_fitting(folder, name, taken, check), name))
        except Damaged as error:
            # Other shards may hold the workers.
            damage = damage or error
            continue
        lacking, stop = _lacking(taken, first, count)
        is_lacking = lacking < stop
        # Where workers span processes, all shards have pieces of them.
        if not is_lacking and not (unread and _has_pieces(taken[0][0])):
            break
        guess = lacking * of // taken[0][0].workers if is_lacking else min(unread)
    if taken and not is_lacking and not (damage and _has_pieces(taken[0][0])):
        return _joined([shard for shard, _ in taken], first, stop)
    raise damage or _incomplete(names)


def _has_pieces(shard: Shard) -> bool:
    """Whether workers span processes, so that others have pieces of their arrays."""
    return any(array_name(name) != name for name in shard.own)


def _lacking(
    taken: list[tuple[Shard, ShardName]], first: int, count: int | None
) -> tuple[int, int]:
    """Returns the first worker that no shard holds yet, and the end of those wanted."""
    shard, name = taken[-1]
    stop = shard.workers if count is None else first + count
    if stop > shard.workers:
        has = f"{shard.workers} workers, none of them number {stop - 1}"
        raise Incomplete(f"{name.file_name} is of {has}")
    for held in sorted((shard.held for shard, _ in taken), key=lambda x: x.start):
        if held.start <= first:
            first = max(first, held.stop)
    return first, stop


def _incomplete(names: list[ShardName]) -> Incomplete:
    """Reports the missing shards of a checkpoint in which these are there."""
    step, _, of = names[0]
    there = {name.number for name in names}
    missing = of - len(there)
    if not missing:
        return Incomplete(f"{names[0].file_name} and the others lack some workers")
    first = next(number for number in counted() if number not in there)
    name = ShardName(step, first, of).file_name
    more = f", and {missing - 1} more parts of {of}" if missing > 1 else ""
    return Incomplete(f"{name} is missing{more}")


def _read_fitting(
    folder: Path,
    name: ShardName,
    taken: list[tuple[Shard, ShardName]],
    check: Callable[[Shard], object] | None,
) -> Shard:
    """Reads a shard; raises Damaged if it is of another run than those taken."""
    shard = shard_file.read(folder / name.file_name)
    try:
        if check is not None:
            check(shard)
    except ValueError as error:
        raise Damaged(f"{name.file_name} is not usable: {error}") from error
    for other, its in taken[:1]:
        if shard.workers != other.workers:
            raise Damaged(
                f"{name.file_name} is of {shard.workers} workers, {its.file_name} of "
                f"{other.workers}"
            )
        if _arrays(shard) != _arrays(other):
            raise Damaged(f"{name.file_name} has other arrays than {its.file_name}")
        if any(shard.record.get(x) != other.record.get(x) for x in COMMON):
            raise Damaged(f"{name.file_name} is of another run than {its.file_name}")
    return shard


def _arrays(shard: Shard) -> tuple[dict, dict]:
    """Dtypes and shapes by name, those of `own` without their rows."""

    def facts(name: str, x: np.ndarray, leading: int) -> tuple[Any, ...]:
        return (x.dtype, None if array_name(name) != name else x.shape[leading:])

    own = {array_name(name): facts(name, x, 1) for name, x in shard.own.items()}
    shared = {array_name(name): facts(name, x, 0) for name, x in shard.shared.items()}
    return own, shared


def _joined(taken: list[Shard], first: int, stop: int) -> Shard:
    """Joins the workers from first to stop of shards that hold them all."""
    by_workers: dict[int, Shard] = {}
    for shard in sorted(taken, key=lambda x: x.first):
        # Of workers that span processes, each of these has pieces.
        other = by_workers.setdefault(shard.first, shard)
        if other is not shard:
            other.own.update(shard.own)
            other.shared.update(shard.shared)
            shard.own.clear()  # so that `other` alone holds them
    taken, slices, done = [*by_workers.values()], [], first
    for shard in taken:
        start, end = (min(max(done, x), stop) for x in (shard.first, shard.held.stop))
        slices.append(slice(start - shard.first, end - shard.first))
        done = max(done, end)
    # Leaf by leaf, each let go of: two copies of the state may not fit.
    own = {
        name: np.concatenate(
            [shard.own.pop(name)[x] for shard, x in zip(taken, slices, strict=True)]
        )
        for name in list(taken[0].own)
    }
    return taken[0]._replace(first=first, own=own)


def _shard_names(folder: Path) -> list[ShardName]:
    """The shards in a folder, by the names of its files, in order."""
    names = map(shard_file.parse_name, _file_names(folder))
    return sorted(name for name in names if name)


def _file_names(folder: Path) -> list[str]:
    """The names of a folder's files; none if there is no folder."""
    try:
        with os.scandir(folder) as found:
            # A link to what is not there now names a file all the same.
            return [x.name for x in found if x.is_file() or x.is_symlink()]
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return []
