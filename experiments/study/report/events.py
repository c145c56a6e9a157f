"""Metrics as TensorBoard's event files."""

import importlib.util
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def check() -> None:
    """Raises a ValueError if no event files could be written."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "--tensorboard needs tensorboardX, which is not installed: "
            "pip install -e '.[tensorboard]' in the checkout"
        )


def write_events(
    folder: Path, runs: Iterable[tuple[str, Iterable[Mapping[str, Any]]]]
) -> None:
    """Writes a folder of scalars for each run, in place of those that lie there.

    Each metric is a tag. A line's `seconds` are its time, so that TensorBoard's
    "relative" axis shows the time of training; what was not measured is left out.

    Args:
        folder: of all runs, such as STUDY/tensorboard.
        runs: names, and the lines of their metrics.jsonl.

    Raises:
        ValueError: tensorboardX is not installed.
        OSError: a file cannot be written.
    """
    check()
    from tensorboardX import SummaryWriter

    for name, lines in runs:
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        for earlier in own.glob("events.out.tfevents.*"):
            earlier.unlink()  # TensorBoard would show both
        with SummaryWriter(str(own)) as writer:
            for line in lines:
                for key, value in line.items():
                    if key != "step" and measured(value):
                        seconds = line.get("seconds")
                        writer.add_scalar(key, value, line["step"], seconds or 0.0)


def measured(value: Any) -> bool:
    """Whether it is a finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)
