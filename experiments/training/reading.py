"""Reads and checks the files of a finished run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from experiments.training import json_files
from experiments.training.json_files import Damaged
from experiments.training.measurements import sends
from experiments.training.records import Line, beside_summary, check_lines


class Settings(TypedDict):
    """The settings in config.json that are read."""

    steps: int
    workers: int
    batch_size: int
    partition: str
    sync_until: int


class Config(TypedDict):
    """The fields of a run's config.json that are read."""

    settings: Settings
    task_arguments: dict[str, Any]
    backend: str
    devices: int
    platform: str
    mesh: NotRequired[dict[str, int]]
    versions: dict[str, str]


class SendsOfRun(sends.SendsJson):
    """The sends of a run, and the local steps that a message may take."""

    delay: int


class Summary(TypedDict):
    """The fields of summary.json that are read, without the task's measures."""

    steps: int
    seconds: float
    workers: int
    devices: int
    platform: str
    mesh: NotRequired[dict[str, int]]
    lr: float
    effective_lr: float | None
    train_loss: float | None
    test_loss: float | None
    bytes_per_worker: float | None
    syncs: int | None
    sends: SendsOfRun | None
    center_step: int
    not_counted: str | None
    diverged: bool
    stopped: NotRequired[bool]
    seed: NotRequired[int]
    sha256: NotRequired[str]


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
    summary = json_files.read(path, Summary)
    # A stopped run of a `compare --list` command also has a summary.
    if summary.get("stopped"):
        return None
    config = json_files.read(out / "config.json", Config)
    lines = json_files.read_lines(out / "metrics.jsonl", dict)
    _check_lines(out / "metrics.jsonl", lines, summary)
    _check_summary(path, summary, config)
    # Last, because it cannot tell which file was changed.
    json_files.check_seal(path, summary, *beside_summary(out))
    return Made(config, summary, lines)


def _check_lines(path: Path, lines: Sequence[Line], summary: Line) -> None:
    """Raises a Damaged for lines that do not match the summary."""
    if not lines:
        raise Damaged(path, "it is empty")
    check_lines(path, lines)
    # Files of 0.2 have no checksum: common values must agree.
    last = {**lines[-1], "steps": lines[-1]["step"]}
    for key in sorted(last | summary):
        is_measured = key.startswith("test_") or key in ("train_loss", "steps")
        if is_measured and (key not in last or last[key] != summary.get(key)):
            raise Damaged(path, f"its last line differs from summary.json in {key}")


def _check_summary(path: Path, summary: Line, config: Line) -> None:
    """Raises a Damaged for a summary that contradicts itself or the config."""
    for key in config.keys() & summary.keys():
        if config[key] != summary[key]:
            raise Damaged(path, f"its {key!r} differs from config.json")
    counts = {x: summary[x] for x in ("workers", "devices")} | summary.get("mesh", {})
    if few := [name for name, x in counts.items() if x < 1]:
        raise Damaged(path, f"{few[0]!r} must be at least 1, got {counts[few[0]]}")
    done, steps = summary["steps"], config["settings"]["steps"]
    if done > steps or (done < steps and not summary["diverged"]):
        raise Damaged(path, f"it has {done} steps, but config.json has {steps}")
    if summary["sends"] and not sends.is_sound(summary["sends"], (done, steps)):
        raise Damaged(path, f"'sends' do not match a run of {steps} steps")
