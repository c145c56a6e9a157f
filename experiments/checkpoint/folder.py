"""The folder of a run's checkpoints: which are there, reading, and room for more.

Every process writes its own workers (see `parts`); a restoring run may have another
number of processes. Folders may be shared between hosts or not.
"""

from collections import Counter
from pathlib import Path

import numpy as np

from experiments.checkpoint import shard_file
from experiments.checkpoint.shard_file import Damaged, Part, Place

# What the records of all parts of a run have in common; earlier ones lack `run_id`.
COMMON = ("run_id", "settings")


class Incomplete(Exception):
    """Parts of a checkpoint are missing; the message is one line that names one."""


def steps(folder: Path) -> list[int]:
    """The steps of all checkpoints in a folder, the newest first.

    They are judged by names of files alone: any may prove incomplete or damaged.
    """
    return sorted({place.step for place in _places(folder)}, reverse=True)


def load(
    folder: Path, step: int, first: int | None = None, count: int | None = None
) -> Part:
    """Puts a checkpoint's rows together, whatever parts they are in.

    Args:
        folder: of the checkpoints.
        step: one of `steps`.
        first: the number of the first worker wanted; None: 0.
        count: workers wanted; None: all from `first` on.

    Returns:
        A part of those workers, in arrays of its own; shared and record are those of
        any part, as all are of one run. If a step is there in several layouts (0-of-1;
        0-of-2 and 1-of-2), they are from one, the first that serves: complete ones
        come first.

    Raises:
        Damaged: a part that is needed is, or does not fit the others.
        Incomplete: parts that are needed are missing.
        OSError: a file cannot be read.
    """
    found = [place for place in _places(folder) if place.step == step]
    if not found:
        raise Incomplete(f"step-{step:08}: no part of it is there")
    sets = [[p for p in found if p.of == of] for of in {p.of for p in found}]
    errors = []
    for places in sorted(sets, key=lambda x: (len(x) < x[0].of, x[0].of)):
        try:
            return _assembled(folder, places, first or 0, count)
        except (Damaged, Incomplete) as error:
            errors.append(error)
    raise errors[0]


def prune(
    folder: Path, keep: int, number: int, of: int, newest: int | None = None
) -> None:
    """Removes a process's parts of old checkpoints, and its unfinished file.

    What runs of another number of processes left counts as its own: none of them is
    at work now.

    Args:
        folder: of the checkpoints.
        keep: the newest steps to keep; 0 removes all. With 1, the others must be known
            to have written theirs: until then the one before is the last complete one.
        number: of the process's parts.
        of: parts in all.
        newest: the step that was written or restored last. Newer ones were written by
            a run that was given up: they are removed, lest they be taken for newer
            than what follows, or mixed with it. None: there are none.

    Raises:
        OSError: a file cannot be removed.
    """
    valid = [x for x in steps(folder) if newest is None or x <= newest]
    for step in {*steps(folder)} - {*valid[:keep]}:
        remove(folder, step, number, of)
    for name in _names(folder):
        writer = shard_file.writer(name)
        if writer and (writer[0] == number or writer[1] != of):
            (folder / name).unlink(missing_ok=True)


def remove(folder: Path, step: int, number: int, of: int) -> None:
    """Removes a process's part of a checkpoint, and those of other layouts.

    Raises:
        OSError: a file cannot be removed.
    """
    for place in _places(folder):
        if place.step == step and (place.number == number or place.of != of):
            (folder / place.file_name).unlink(missing_ok=True)


def is_there(folder: Path, step: int, number: int, of: int) -> bool:
    """Whether a process's part of a checkpoint is there, or all parts of any layout."""
    found = [place for place in _places(folder) if place.step == step]
    counts = Counter(place.of for place in found)
    whole = any(count == parts for parts, count in counts.items())
    return whole or Place(step, number, of) in found


def _assembled(
    folder: Path, places: list[Place], first: int, count: int | None
) -> Part:
    """The rows, from few parts: they are large, and a process need not read all."""
    of = places[0].of
    unread = {p.number: p for p in places}
    damage, taken = None, []
    # Rows are split evenly as a rule, and those wanted are often one part's.
    guess = first // count if count else 0
    while unread:
        place = unread.pop(min(unread, key=lambda x: abs(x - guess)))
        try:
            part = shard_file.read(folder / place.file_name)
            if taken:
                _check_fits(part, place, *taken[0])
        except Damaged as error:  # others may hold the rows
            damage = damage or error
            continue
        taken.append((part, place))
        stop = part.workers if count is None else first + count
        if stop > part.workers:
            told = f"{part.workers} workers, none of them number {stop - 1}"
            raise Incomplete(f"{place.file_name} is of {told}")
        held = {row for part, _ in taken for row in part.held}
        lacking = [row for row in range(first, stop) if row not in held]
        if not lacking:
            return _joined([part for part, _ in taken], first, stop)
        guess = lacking[0] * of // part.workers
    raise damage or _incomplete(places)


def _incomplete(places: list[Place]) -> Incomplete:
    """What is missing of a checkpoint of which these parts are there."""
    step, _, of = places[0]
    missing = sorted(set(range(of)) - {p.number for p in places})
    if not missing:
        return Incomplete(f"{places[0].file_name} and the others lack some workers")
    name = Place(step, missing[0], of).file_name
    more = f", and {len(missing) - 1} more parts of {of}" if missing[1:] else ""
    return Incomplete(f"{name} is missing{more}")


def _check_fits(part: Part, place: Place, other: Part, its: Place) -> None:
    """Raises Damaged if a part is of another run than one of the same step."""
    if part.workers != other.workers:
        raise Damaged(
            f"{place.file_name} is of {part.workers} workers, {its.file_name} of "
            f"{other.workers}"
        )
    if _layout(part) != _layout(other):
        raise Damaged(f"{place.file_name} has other arrays than {its.file_name}")
    if any(part.record.get(x) != other.record.get(x) for x in COMMON):
        raise Damaged(f"{place.file_name} is of another run than {its.file_name}")


def _layout(part: Part) -> tuple[dict, dict]:
    """Dtypes and shapes by name, those of `own` without their rows."""
    own = {name: (x.dtype, x.shape[1:]) for name, x in part.own.items()}
    return own, {name: (x.dtype, x.shape) for name, x in part.shared.items()}


def _joined(taken: list[Part], first: int, stop: int) -> Part:
    """The rows from first to stop of parts that hold them all."""
    taken, slices, done = sorted(taken, key=lambda x: x.first), [], first
    for part in taken:
        start, end = (min(max(done, x), stop) for x in (part.first, part.held.stop))
        slices.append(slice(start - part.first, end - part.first))
        done = max(done, end)
    own = {  # leaf by leaf, and let go of: both copies may not fit
        name: np.concatenate(
            [part.own.pop(name)[x] for part, x in zip(taken, slices, strict=True)]
        )
        for name in list(taken[0].own)
    }
    return taken[0]._replace(first=first, own=own)


def _places(folder: Path) -> list[Place]:
    """The parts in a folder, by the names of its files, in order."""
    return sorted(x for name in _names(folder) if (x := shard_file.place(name)))


def _names(folder: Path) -> list[str]:
    """Of the files in a folder; none if there is no folder."""
    return [x.name for x in folder.iterdir() if x.is_file()] if folder.exists() else []
