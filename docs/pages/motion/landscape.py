"""The loss of the animations: a curved valley, on which each worker has a slope more.

For params (u, v), the same for all workers but for a tilt t and noise of their own:

    loss(u, v) = a / 2 (u - 1)² + b / 2 (v - c u²)² + (t + noise) · (u, v)

The tilts add up to zero, so the mean loss over workers and noise is that of the valley.
"""

from typing import Any

import numpy as np

ALONG = 0.4
ACROSS = 4.8  # a and b: 12 times as steep across the valley as along it
BEND = 0.33  # c
BEST = np.array([1.0, BEND])
START = np.array([-1.6, 1.45])
LEFT = -2.1
RIGHT = 2.1
BOTTOM = -0.65
TOP = 1.7  # of the picture

# One row for each worker. Without a sync a worker ends in a minimum of its own.
TILTS = np.array([[0.32, 0.0], [-0.2, 0.4], [-0.38, 0.0], [0.26, -0.4]])
NOISE = np.array([0.15, 0.4])  # standard deviations of an example

LEVELS = 0.006 * 1.9 ** np.arange(14)


def valley(u: Any, v: Any) -> Any:
    """Returns the mean loss over all workers; its arguments are arrays of any kind."""
    return ALONG / 2 * (u - 1) ** 2 + ACROSS / 2 * (v - BEND * u**2) ** 2


def examples(steps: int, seed: int = 0) -> np.ndarray:
    """Draws what each worker sees: its tilt with noise, (workers, steps, 2)."""
    shape = len(TILTS), steps, 2
    noise = np.random.default_rng(seed).normal(size=shape) * NOISE
    return (TILTS[:, None] + noise).astype(np.float32)


def own_minima() -> np.ndarray:
    """Returns where each worker's own loss is lowest, (workers, 2)."""
    along, across = TILTS.T
    u = (ALONG - along) / (ALONG + 2 * BEND * across)
    return np.stack([u, BEND * u**2 - across / ACROSS], axis=1)


def contour(level: float, points: int = 24) -> np.ndarray:
    """Returns points of the line on which the mean loss is `level`, (points, 2)."""
    # In u and the distance from the valley's floor, lines of one loss are ellipses.
    angle = np.linspace(0, 2 * np.pi, points, endpoint=False)
    u = 1 + np.sqrt(2 * level / ALONG) * np.cos(angle)
    distance = np.sqrt(2 * level / ACROSS) * np.sin(angle)
    return np.stack([u, BEND * u**2 + distance], axis=1)
