"""Metrics as TensorBoard's event files."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_events(
    folder: Path, runs: Iterable[tuple[str, Iterable[Mapping[str, Any]]]]
) -> None:
    """Writes a folder of scalars for each run, in place of earlier ones.

    Each metric is a tag. A line's `seconds` are its time: TensorBoard's "relative" axis
    then shows the time of training. Missing figures are left out.

    Args:
        folder: of all runs, such as STUDY/tensorboard.
        runs: names, and the lines of their metrics.jsonl.

    Raises:
        OSError: a file cannot be written.
    """
    for name, lines in runs:
        _write_run(folder / name, lines)


def _write_run(folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes the scalars of one run."""
    from tensorboardX import SummaryWriter

    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("events.out.tfevents.*"):
        # TensorBoard would show both.
        earlier.unlink()
    scalars = (
        (key, value, line["step"], line.get("seconds") or 0.0)
        for line in lines
        for key, value in line.items()
        if key != "step" and type(value) in (int, float) and math.isfinite(value)
    )
    with SummaryWriter(str(folder)) as writer:
        for scalar in scalars:
            writer.add_scalar(*scalar)
