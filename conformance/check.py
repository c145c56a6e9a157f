"""Checks an implementation against the vectors of this folder: docs/conformance.md."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def read(name: str) -> dict[str, Any]:
    """Returns the vectors of an algorithm, from NAME.json beside this file."""
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text("utf-8"))


def check(
    vectors: dict[str, Any],
    step: Callable[[list[np.ndarray]], Sequence],
    tolerance: float = 1e-9,
    center: Callable[[], Any] | None = None,
) -> float:
    """Trains with a file's gradients and compares the params after each step.

    Args:
        vectors: a file's content.
        step: called once for each step, with the workers' gradients, (size,) each;
            returns their params after it, in the same order and form.
        tolerance: the largest difference of an entry, absolute. Files have 10 decimals.
        center: returns the center after that step, (size,), to compare it, too.

    Returns:
        The largest difference.

    Raises:
        AssertionError: the first difference, with step, worker and entry, in one line.
    """
    largest = 0.0
    for number, row in enumerate(vectors["steps"]):
        found = {"params": step([np.array(g) for g in row["gradients"]])}
        if center is not None:
            found["center"] = [center()]
        for what, values in found.items():
            values = np.array([np.asarray(x, float) for x in values])
            workers = vectors["workers"] if what == "params" else 1
            wanted = np.broadcast_to(row[what], (workers, len(vectors["start"])))
            place = f"{vectors['algorithm']}: {what} after step {number}"
            if values.shape != wanted.shape:
                raise AssertionError(f"{place}: {values.shape}, not {wanted.shape}")
            apart = np.abs(values - wanted)
            for worker, entry in np.argwhere(~(apart <= tolerance))[:1]:
                whose = f" of worker {worker}" * (what == "params")
                raise AssertionError(
                    f"{place}{whose} differ by {apart[worker].max():.3g}: entry "
                    f"{entry} is {values[worker, entry]:.8g}, not "
                    f"{wanted[worker, entry]:.8g} (tolerance {tolerance:g})"
                )
            largest = max(largest, float(apart.max()))
    return largest
