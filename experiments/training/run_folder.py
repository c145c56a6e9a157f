"""The files of a run: config.json, metrics.jsonl, summary.json and the export."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from experiments import files
from experiments.command.errors import BadRequest
from experiments.training.progress import Evaluation

NAMES = ("config.json", "metrics.jsonl", "summary.json")


def check_out(out: Path, overwrite: bool) -> None:
    """Raises a BadRequest if a folder holds a run that must not be replaced."""
    present_names = [name for name in NAMES if (out / name).exists()]
    if present_names and not overwrite:
        raise BadRequest(
            f"--out {out} already holds a run ({', '.join(present_names)}): use "
            "another folder, --resume to continue the run, or --overwrite"
        )


def check_writable(out: Path) -> None:
    """Raises a BadRequest if no file can be written to a folder; leaves no file."""
    with files.refuse_os_errors("--out", out):
        files.try_to_write(out)


def find_export(out: Path) -> Path | None:
    """Returns the file to which a folder's run exports its model; None if none."""
    path = out / "config.json"
    with suppress(OSError, files.Damaged), files.using(path):
        return Path(files.read(path)["settings"]["export"])
    return None


def default_out(task: str, algo: str, *numbers: int) -> Path:
    """Returns a new folder's name: runs/TASK-ALGO-TIME, numbered if it is taken."""
    parts = (task, algo, time.strftime("%Y%m%d-%H%M%S"), *numbers)
    name = "-".join(map(str, parts)).replace(":", ".")  # scp would read a host
    path = Path("runs") / name
    number = 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


class Metrics:
    """A writer of metrics.jsonl, which catches up after the disk was full."""

    def __init__(self, out: Path, note: Callable[[str], None]):
        self._out = out
        self._note = note
        self._is_behind = False

    def add(self, evaluations: Sequence[Evaluation]) -> None:
        """Appends the last of the run's evaluations."""
        try:
            # Usually one line is appended; after a failure all lines are written.
            if self._is_behind:
                write_metrics(self._out, [x.to_json() for x in evaluations])
            else:
                with (self._out / "metrics.jsonl").open("a") as file:
                    file.write(files.json_lines([evaluations[-1].to_json()]))
            self._is_behind = False
        except OSError as error:
            if not self._is_behind:
                self._note(f"{self._out}/metrics.jsonl: {error.strerror}; will retry")
            self._is_behind = True


def write_metrics(out: Path, lines: list[dict[str, Any]]) -> None:
    """Writes metrics.jsonl, unless it holds these lines already."""
    path = out / "metrics.jsonl"
    text = files.json_lines(lines)
    if not path.exists() or files.read_bytes(path) != text.encode():
        files.write(path, text)


def finish(out: Path, summary: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Writes summary.json, and the missing lines of metrics.jsonl.

    Raises:
        OSError: a file cannot be written.
    """
    write_metrics(out, lines)
    files.write_json(out / "summary.json", summary, *(out / name for name in NAMES[:2]))


class RunFiles(NamedTuple):
    """The contents of the files of a run."""

    config: dict[str, Any]
    summary: dict[str, Any]
    lines: list[dict[str, Any]]


def read_run(out: Path) -> RunFiles | None:
    """Reads the files of a run; returns None if it has not finished.

    Raises:
        Damaged: a file is not as it was written.
        OSError: a file cannot be read.
    """
    path = out / "summary.json"
    if not path.exists():
        return None
    config_path = out / "config.json"
    metrics_path = out / "metrics.jsonl"
    summary = files.read(path, files.SEAL, beside=(config_path, metrics_path))
    # A stopped run of a `compare --list` command also has a summary.
    if summary.get("stopped"):
        return None
    return RunFiles(
        config=files.read(config_path),
        summary=summary,
        lines=files.read_lines(metrics_path),
    )
