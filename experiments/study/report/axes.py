"""Curves as arrays, and how far the axes reach that show them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.study.analysis.quantities import Quantity
from experiments.study.analysis.results import Curve


class Line(NamedTuple):
    """What is drawn of a curve: x, mean, low and high of one length, NaN for gaps."""

    curve: Curve
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def numbers(values: Sequence[float | None]) -> np.ndarray:
    """As an array, with NaN for what is missing or infinite."""
    array = np.array([np.nan if x is None else x for x in values], float)
    return np.where(np.isfinite(array), array, np.nan)


def line_of(curve: Curve, quantity: Quantity, x: Sequence[float]) -> Line:
    """The quantity of the curve, as it is shown."""
    band = curve.bands[quantity.key]
    shown = [numbers(y) * quantity.scale for y in (band.mean, band.low, band.high)]
    return Line(curve, numbers(x), *shown)


def limits_of(
    quantity: Quantity, curves: Sequence[Curve]
) -> tuple[float, float, bool] | None:
    """Low and high end of the axis, the same in all views, and whether it is a log.

    The first quarter of a run may begin outside: there all figures are far from those
    that are compared. So may a run that diverges.
    """
    lines = [line_of(c, quantity, c.steps) for c in curves if quantity.key in c.bands]
    lines = [x for x in lines if np.isfinite(x.mean).any()]
    if not lines:
        return None
    settled = [settled_part(x) for x in lines]
    fence = np.inf if quantity.bounded else fence_of([mean for mean, *_ in settled])
    rows = np.concatenate(settled, axis=1)
    rows = rows[:, rows[0] <= fence]  # a gap is not
    low, high = float(np.nanmin(rows)), float(np.nanmax(rows[rows <= 2 * fence]))
    positive = rows[0][rows[0] > 0]
    if quantity.log and len(positive) and positive.max() > 50 * positive.min():
        return float(positive.min() / 1.5), float(positive.max() * 1.5), True
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 0.5
    if rows[0].min() >= 0 and low < max(0.2 * high, margin):
        return 0.0, high + margin, False
    return low - margin, high + margin, False


def fence_of(means: Sequence[np.ndarray]) -> float:
    """Above it lies only what diverges: far from the best line, as it itself goes."""
    fences = []
    for mean in means:
        middle, extent = np.nanmedian(mean), np.nanmax(mean) - np.nanmin(mean)
        fences += [float(middle + 8 * max(extent, abs(middle) / 2))]
    return min((fence for fence in fences if fence > 0), default=np.inf)


def settled_part(line: Line) -> np.ndarray:
    """Mean, low and high after the first quarter of the steps, as rows."""
    late = line.x >= 0.25 * np.nanmax(line.x)
    rows = np.stack([line.mean, line.low, line.high])
    return rows[:, late] if np.isfinite(line.mean[late]).any() else rows


def visible(line: Line, limits: tuple[float, float, bool]) -> np.ndarray:
    """Where the line lies within the picture, of an axis without 0."""
    low, high, _ = limits
    return line.x[(line.x > 0) & (line.mean >= low) & (line.mean <= high)]
