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
        gradients = [np.array(gradient) for gradient in row["gradients"]]
        place = f"{vectors['algorithm']}: params after step {number}"
        difference = _compare(
            step(gradients),
            row["params"],
            vectors,
            place,
            tolerance,
            vectors["workers"],
        )
        largest = max(largest, difference)
        if center is not None:
            place = f"{vectors['algorithm']}: center after step {number}"
            difference = _compare([center()], row["center"], vectors, place, tolerance)
            largest = max(largest, difference)
    return largest


def _compare(
    values: Sequence,
    expected: Any,
    vectors: dict[str, Any],
    place: str,
    tolerance: float,
    workers: int | None = None,
) -> float:
    """Returns the largest difference from expected rows; None is for the center."""
    rows = np.array([np.asarray(value, float) for value in values])
    shape = (workers or 1, len(vectors["start"]))
    expected_rows = np.broadcast_to(expected, shape)
    if rows.shape != shape:
        raise AssertionError(f"{place}: {rows.shape}, not {shape}")
    differences = np.abs(rows - expected_rows)
    wrong = np.argwhere(~(differences <= tolerance))  # NaN, too
    if len(wrong):
        worker, entry = wrong[0]
        if workers is not None:
            place = f"{place} of worker {worker}"
        raise AssertionError(
            f"{place} differ by {differences[worker].max():.3g}: entry {entry} is "
            f"{rows[worker, entry]:.8g}, not {expected_rows[worker, entry]:.8g} "
            f"(tolerance {tolerance:g})"
        )
    return float(differences.max())
