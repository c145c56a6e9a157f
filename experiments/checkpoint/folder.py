"""The folder of a run's checkpoints: listing, loading and pruning.

Each process writes the state of its own workers (see `shard_file`). A run may restore
them with a different number of processes. Hosts need not share the folder.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from itertools import count as counted
from pathlib import Path
from typing import Any

import numpy as np

from experiments.checkpoint import shard_file
from experiments.checkpoint.pieces import array_name
from experiments.checkpoint.shard_file import Damaged, Shard, ShardName

Check = Callable[[Shard], object]


class Incomplete(Exception):
    """Shards of a checkpoint are missing; the message is one line that names one."""


def steps(folder: Path) -> list[int]:
    """Returns the steps of all checkpoints in a folder, the newest first.

    Only the files' names are read: a checkpoint may still be incomplete or damaged.
    """
    return sorted({name.step for name in _shard_names(folder)}, reverse=True)


def load(
    folder: Path,
    step: int,
    first: int | None = None,
    count: int | None = None,
    check: Check = lambda shard: None,
) -> Shard:
    """Loads workers of a checkpoint, from as many shards as needed.

    Args:
        folder: the folder of the checkpoints.
        step: one of `steps`.
        first: the number of the first worker to load; None means 0.
        count: the number of workers to load; None means all from `first` on.
        check: raises a ValueError for a shard that cannot be used.

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
            return _load_layout(folder, layouts[of], first or 0, count, check)
        except (Damaged, Incomplete) as error:
            errors.append(error)
    raise errors[0] if errors else Incomplete(f"step-{step:08} has no shard files")


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
    old = [x for x in found[keep:] if x != best]
    remove(folder, old, number, of, run_ids)
    for name in _file_names(folder):
        writer = shard_file.writer(name)
        if writer and (writer[0] == number or writer[1] != of):
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
        is_ours = name.step in steps and (name.number == number or name.of != of)
        if is_ours and (run_ids is None or _is_of(path, run_ids)):
            path.unlink(missing_ok=True)


def _is_of(path: Path, run_ids: Collection[str | None]) -> bool:
    """Whether one of these runs wrote a shard; False if its record is unreadable."""
    try:
        return shard_file.read_record(path).get("run_id") in [*run_ids]
    except (Damaged, OSError):
        return False


def is_first_save(folder: Path) -> bool:
    """Whether the folder holds only shards of an interrupted first save."""
    names = _shard_names(folder)
    counts = Counter(name.of for name in names)
    if len({name.step for name in names}) > 1 or any(x == n for x, n in counts.items()):
        return False
    records = (shard_file.read_record(folder / name.file_name) for name in names)
    try:
        return all(record["progress"]["saved"] == 0 for record in records)
    except (Damaged, OSError, LookupError, TypeError):
        return False


def identity(shard: Shard) -> dict[str, Any]:
    """Returns the values that all shards of a checkpoint have in common.

    Records of earlier versions lack the ids of the run and of its start.
    """
    names = ("run_id", "start_id", "settings")
    return {"workers": shard.workers, **{x: shard.record.get(x) for x in names}}


def _load_layout(
    folder: Path, names: list[ShardName], first: int, count: int | None, check: Check
) -> Shard:
    """Loads workers from as few shards as possible, because shards are large."""
    unread = {name.number: name for name in names}
    taken: dict[ShardName, Shard] = {}
    damage: Damaged | None = None
    lacking, stop, is_spread = first, first, False
    # Workers are usually split evenly, so one shard often holds all wanted workers.
    guess = first // count if count else 0
    while unread:
        name = unread.pop(min(unread, key=lambda x: abs(x - guess)))
        try:
            shard = taken[name] = _read_fitting(folder, name, taken, check)
        except Damaged as error:
            # Other shards may hold the wanted workers.
            damage = damage or error
            continue
        stop = shard.workers if count is None else first + count
        if stop > shard.workers:
            has = f"{shard.workers} workers and has no worker {stop - 1}"
            raise Incomplete(f"{name.file_name} is of a run that had {has}")
        # No set: a damaged shard may claim any number of workers.
        held = [each.held for each in taken.values()]
        wanted = range(first, stop)
        lacking = next((x for x in wanted if not any(x in y for y in held)), None)
        # If workers span processes, all shards hold pieces of their arrays.
        is_spread = any(array_name(x) != x for x in shard.own)
        if lacking is not None:
            guess = lacking * name.of // shard.workers
        elif unread and is_spread:
            guess = min(unread)
        else:
            break
    if taken and lacking is None and not (damage and is_spread):
        return _joined([*taken.values()], first, stop)
    raise damage or _incomplete(names)


def _incomplete(names: list[ShardName]) -> Incomplete:
    """Reports which shards of a checkpoint are missing, given the existing ones."""
    step, _, of = names[0]
    there = {name.number for name in names}
    missing = of - len(there)
    if not missing:
        return Incomplete(f"{names[0].file_name} and the others lack some workers")
    first = next(number for number in counted() if number not in there)
    name = ShardName(step, first, of).file_name
    more = f", and {missing - 1} more of {of} files" if missing > 1 else ""
    return Incomplete(f"{name} is missing{more}")


def _read_fitting(
    folder: Path, name: ShardName, taken: dict[ShardName, Shard], check: Check
) -> Shard:
    """Reads a shard; raises Damaged if it belongs to another run than `taken`."""
    shard = shard_file.read(folder / name.file_name)
    try:
        check(shard)
    except ValueError as error:
        raise Damaged(f"{name.file_name} is not usable: {error}") from error
    for other in [*taken][:1]:
        before, now = _common(taken[other]), _common(shard)
        if differing := [x for x in before if now[x] != before[x]]:
            raise Damaged(
                f"{name.file_name} is of another run than {other.file_name}: its "
                f"{differing[0]} differ"
            )
    return shard


def _common(shard: Shard) -> dict[str, Any]:
    """Returns `identity`, and the arrays' dtypes and shapes without their rows."""
    arrays = [
        (rows, array_name(name), x.dtype, array_name(name) == name and x.shape[rows:])
        for rows, part in enumerate((shard.shared, shard.own))  # axes of rows
        for name, x in part.items()
    ]
    return {**identity(shard), "arrays": {*arrays}}


def _joined(taken: list[Shard], first: int, stop: int) -> Shard:
    """Joins the workers from first to stop; the shards hold all of them."""
    by_workers: dict[int, Shard] = {}
    for shard in sorted(taken, key=lambda x: x.first):
        # Shards with the same first worker hold pieces of workers that span processes.
        other = by_workers.setdefault(shard.first, shard)
        if other is not shard:
            other.own.update(shard.own)
            other.shared.update(shard.shared)
            shard.own.clear()  # so that `other` alone holds them
    slices, done = [], first
    for shard in by_workers.values():
        start, end = (min(max(done, x), stop) for x in (shard.first, shard.held.stop))
        slices.append((shard, slice(start - shard.first, end - shard.first)))
        done = max(done, end)
    whole = slices[0][0]
    # Leaf by leaf, to free each one: two copies of the state may not fit in memory.
    own = {
        name: np.concatenate([shard.own.pop(name)[rows] for shard, rows in slices])
        for name in list(whole.own)
    }
    return whole._replace(first=first, own=own)


def _shard_names(folder: Path) -> list[ShardName]:
    """Returns the names of the shards in a folder, in order."""
    names = map(shard_file.parse_name, _file_names(folder))
    return sorted(name for name in names if name)


def _file_names(folder: Path) -> list[str]:
    """Returns the names of a folder's files; none if the folder is missing."""
    try:
        with os.scandir(folder) as found:
            # A broken link still counts as the name of a file.
            return [x.name for x in found if x.is_file() or x.is_symlink()]
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return []
