"""Reads and checks the files of a finished run."""

from pathlib import Path
from typing import Any, NamedTuple

from experiments.training import json_files
from experiments.training.records import Line, beside_summary


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
    path = out / "summary.json"
    if not path.exists():
        return None
    summary = json_files.read(path, "steps", "sends", "diverged")
    # A stopped run of a `compare --list` command also has a summary.
    if summary.get("stopped"):
        return None
    config = json_files.read(out / "config.json", "settings", "versions")
    lines = json_files.read_lines(out / "metrics.jsonl")
    json_files.check_seal(path, summary, *beside_summary(out))
    return Made(config, summary, lines)
