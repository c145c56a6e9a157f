"""Reads and checks the files of a finished run."""

from pathlib import Path
from typing import Any, NamedTuple

from experiments.training import json_files
from experiments.training.records import NAMES, Line


class Made(NamedTuple):
    """The contents of the files of a run."""

    config: dict[str, Any]
    summary: dict[str, Any]
    lines: list[Line]


def read_run(out: Path) -> Made | None:
    """Reads the files of a run; returns None if it has not finished.

    Raises:
        Damaged: a file is not as it was written.
        OSError: a file cannot be read.
    """
    path, *beside = out / "summary.json", *(out / name for name in NAMES[:2])
    if not path.exists():
        return None
    summary = json_files.read(path, json_files.SEAL, beside=beside)
    # A stopped run of a `compare --list` command also has a summary.
    if summary.get("stopped"):
        return None
    return Made(json_files.read(beside[0]), summary, json_files.read_lines(beside[1]))
