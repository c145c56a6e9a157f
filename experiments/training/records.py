"""A run's progress, and its files: config.json, metrics.jsonl, summary.json."""

import errno
import json
import math
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from experiments.training import json_files

if TYPE_CHECKING:  # a bad request need not import numpy
    import numpy as np

Line = dict[str, Any]

NAMES = ("config.json", "metrics.jsonl", "summary.json")
# The ends of unfinished files' names; 0.3 did not draw them.
UNFINISHED = r"(?:(?:\.[0-9a-f]{8})?\.tmp|\.unfinished)"

# The figures of each line of metrics.jsonl; a task may add others.
MEASURED = ("step", "train_loss", "worker_losses", "test_loss", "test_accuracy")
MEASURED += ("bytes_per_worker", "divergence", "seconds")


@dataclass
class Progress:
    """Training progress: step, metrics and timings, updated during the run.

    A field that an older checkpoint lacks has its default.

    Attributes:
        step: local steps done.
        lines: the lines of metrics.jsonl.
        losses: the losses of the steps since the last line.
        worker_losses: each worker's sum of losses over the same steps; empty if some
            are not known.
        seconds: training time, without compilation and evaluation.
        first_loss: the loss of the first step; None before it.
        resumed_at: the steps at which the run was resumed.
        sent_before: the most bytes that a worker had sent when the number of workers
            last changed, if known.
        sent_since: the step at which the number of workers last changed.
        earlier_seconds: the total time of the run until its last stop.
        lane_form: the lane form of the last dispatch; None before it.
        run_id: the id of the run, in all shards of its checkpoints; drawn at random
            when the run starts, or when its number of workers changes.
        saved: the step of the newest complete checkpoint; 0 if there is none.
        decided: (step, number of the decision) of each sync that the data triggered;
            both from 0.
    """

    step: int = 0
    lines: list[Line] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    first_loss: float | None = None
    resumed_at: list[int] = field(default_factory=list)
    sent_before: float | None = 0.0
    sent_since: int = 0
    earlier_seconds: float = 0.0
    lane_form: str | None = None
    run_id: str = ""
    saved: int = 0
    decided: list[list[int]] = field(default_factory=list)
    worker_losses: list[float] = field(default_factory=list)

    def stepped(
        self,
        losses: list[float],
        of_workers: "np.ndarray",
        seconds: float,
        decided: Iterable[Sequence[int]] = (),
    ) -> None:
        """Adds a dispatch.

        Args:
            losses: the losses of its steps.
            of_workers: each worker's losses, (steps, workers).
            seconds: its training time.
            decided: like the attribute, with steps counted from the dispatch's first.
        """
        before = self.worker_losses if self.losses else [0.0] * of_workers.shape[1]
        # They differ after a checkpoint of another version or number of workers.
        if len(before) == of_workers.shape[1]:
            # Summed step by step: any split into dispatches gives the same sums.
            sums = of_workers.copy()
            sums[0] += before
            self.worker_losses = sums.cumsum(0)[-1].tolist()
        else:
            self.worker_losses = []
        if self.first_loss is None:
            self.first_loss = losses[0]
        self.decided += [[self.step + step, number] for step, number in decided]
        self.step += len(losses)
        self.losses += losses
        self.seconds += seconds

    def evaluated(self, line: Line) -> None:
        """Adds an evaluation."""
        self.lines.append(line)
        self.losses, self.worker_losses = [], []

    def mean_worker_losses(self) -> list[float] | None:
        """Returns each worker's mean loss since the last line; None if not known."""
        # Six digits: there may be hundreds of workers.
        means = [float(f"{x / len(self.losses):.6g}") for x in self.worker_losses]
        return means or None


def best(lines: Iterable[Line]) -> Line | None:
    """Returns the evaluation with the highest accuracy, or else the lowest loss.

    Among equals, it is the first. None if no loss is finite, as after a divergence.
    """

    def worth(line: Line) -> float:
        accuracy, loss = line["test_accuracy"], line["test_loss"]
        return -loss if accuracy is None else accuracy

    losses = [(x, x["test_loss"]) for x in lines]
    sound = (x for x, loss in losses if loss is not None and math.isfinite(loss))
    return max(sound, key=worth, default=None)


def check_out(out: Path, overwrite: bool) -> None:
    """Raises a ValueError if a folder holds a run that must not be replaced."""
    held = [name for name in NAMES if (out / name).exists()]
    if held and not overwrite:
        raise ValueError(
            f"--out {out} already holds a run ({', '.join(held)}): use another "
            "folder, --resume to continue the run, or --overwrite"
        )


def check_writable(out: Path) -> None:
    """Raises a ValueError if no file can be written to a folder; leaves no file."""
    try:
        try_to_write(out)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from None


def try_to_write(out: Path) -> None:
    """Raises an OSError if no file can be written to a folder; leaves no file."""
    existing = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not existing.is_dir():
        reason = f"{existing} is a file, not a folder"
        raise NotADirectoryError(errno.ENOTDIR, reason)
    # Permissions are not enough: root may write anywhere, but not in /proc.
    with made(out):
        tempfile.TemporaryFile(dir=out).close()


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Makes a folder if needed; removes new folders that stay empty."""
    missing = [x for x in (folder, *folder.absolute().parents) if not x.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        _remove_empty(missing)


def _remove_empty(folders: list[Path]) -> None:
    """Removes folders from the innermost outward, until one is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def exported(out: Path) -> Path | None:
    """Returns the file to which a folder's run exports its model; None if none."""
    path = out / "config.json"
    with suppress(OSError, json_files.Damaged), json_files.using(path):
        return Path(json_files.read(path)["settings"]["export"])
    return None


def default_out(task: str, algo: str, *more: int) -> Path:
    """Returns a new folder's name: runs/TASK-ALGO-TIME, numbered if it is taken."""
    parts = (task, algo, time.strftime("%Y%m%d-%H%M%S"), *more)
    name = "-".join(map(str, parts)).replace(":", ".")  # scp would read a host
    candidates = (name, *(f"{name}-{i}" for i in range(2, 1000)))
    return next(p for c in candidates if not (p := Path("runs") / c).exists())


class Metrics:
    """A writer of metrics.jsonl, which catches up after the disk was full."""

    def __init__(self, out: Path, note: Callable[[str], None]):
        self._out, self._note, self._is_behind = out, note, False

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Appends the last of the run's lines."""
        try:
            # Usually one line is appended; after a failure all lines are written.
            if self._is_behind:
                write_metrics(self._out, lines)
            else:
                with (self._out / "metrics.jsonl").open("a") as file:
                    file.write(_json_lines(lines[-1:]))
            self._is_behind = False
        except OSError as error:
            if not self._is_behind:
                self._note(f"{self._out}/metrics.jsonl: {error.strerror}; will retry")
            self._is_behind = True


def write_metrics(out: Path, lines: list[dict[str, Any]]) -> None:
    """Writes metrics.jsonl, unless it holds these lines already."""
    path, text = out / "metrics.jsonl", _json_lines(lines)
    if not path.exists() or path.read_text(errors="replace") != text:
        write(path, text)


def finish(out: Path, summary: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Writes summary.json, and the missing lines of metrics.jsonl.

    Raises:
        OSError: a file cannot be written.
    """
    write_metrics(out, lines)
    write_json(out / "summary.json", summary, *(out / name for name in NAMES[:2]))


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Writes lines of JSON, so that a reader never sees half a file."""
    write(path, _json_lines(lines))


def _json_lines(lines: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(plain(line)) + "\n" for line in lines)


def write_json(
    path: Path, content: dict[str, Any], *beside: Path, seal: str = json_files.SEAL
) -> None:
    """Writes JSON with a checksum, so that a reader never sees half a file.

    Args:
        path: the file.
        content: the content.
        beside: files that the checksum covers, too.
        seal: the key of the checksum.
    """
    # The checksum is of the content as it will be read.
    read = json.loads(json.dumps(plain(content), default=repr))
    others = (x.read_bytes() for x in beside)
    whole = json_files.sealed(read, *others, seal=seal)
    write(path, json.dumps(whole, indent=2) + "\n")


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
        _remove_unfinished(path.parent, stem)
        try:
            # A new file by a name that nobody can foretell, or an error: a link in its
            # place would lead to a file of someone else.
            with unfinished.open("x+b") as file:
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
            error.filename, error.filename2 = str(path), None
        raise
    sync_folder(path.parent)


def _remove_unfinished(folder: Path, stem: str) -> None:
    """Removes what killed writers of this stem left, where it can be removed."""
    with suppress(OSError):  # a folder may be closed to readers
        for name in os.listdir(folder):
            if re.fullmatch(re.escape(stem) + UNFINISHED, name):
                with suppress(OSError):  # it is a folder, or another user's
                    (folder / name).unlink()


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


def plain(value: Any) -> Any:
    """Returns the value in JSON's types; a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {key: plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
