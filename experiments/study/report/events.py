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
    from tensorboardX import SummaryWriter

    for name, lines in runs:
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        for earlier in own.glob("events.out.tfevents.*"):
            # TensorBoard would show both.
            earlier.unlink()
        with SummaryWriter(str(own)) as writer:
            for line in lines:
                at = line["step"], line.get("seconds") or 0.0
                for key, value in line.items():
                    is_number = type(value) in (int, float) and math.isfinite(value)
                    if key != "step" and is_number:
                        writer.add_scalar(key, value, *at)
