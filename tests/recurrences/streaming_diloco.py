"""Douillard et al. 2025, algorithm 2; the phases of its fragments are torchft's."""

from typing import Any

import numpy as np
from support.problems import SHAPES

from recurrences import PERIOD, START, local_steps, mean


def by_name(params):
    return {"bias": 1, "kernel": 0, "readout": 0, "scale": 1}


SETTINGS = [
    {"period": PERIOD, "fragments": 2, "delay": 1, "alpha": 0.3},
    {"period": PERIOD},
    {"period": PERIOD, "fragments": 1, "outer_lr": 0.4, "outer_momentum": 0.5},
    {"period": 6, "fragments": 3, "delay": 1},
    {"period": PERIOD, "fragments": 2, "alpha": 0.25},
    {"period": PERIOD, "fragments": 2, "cut": by_name},
    {"period": PERIOD, "cut": "bytes"},
    {"period": PERIOD, "fragments": 2, "cut": "bytes", "delay": 1, "alpha": 0.5},
    {"period": PERIOD, "fragments": 2, "cut": "layers"},
    {
        "period": PERIOD,
        "fragments": 2,
        "delay": 1,
        "cut": "layers",
        "layered": {"bias": 0, "kernel": 1, "readout": 0, "scale": 0},
    },
]
ACTS_ON_LEAVES = True


def fragment_of_entries(fragments, cut, layered):
    """The number of each entry's fragment."""
    leaves = {name: np.zeros(shape, int) for name, shape in SHAPES.items()}
    if callable(cut):
        numbers: Any = cut(leaves)
        for name, number in numbers.items():
            leaves[name][...] = number
    elif cut == "leaves":
        for number, names in enumerate(np.array_split([*SHAPES], fragments)):
            for name in names:
                leaves[name][...] = number
    elif cut == "bytes":  # a row is where its middle is
        entries = 0
        for leaf in leaves.values():
            rows = leaf.reshape(len(leaf) if leaf.ndim else 1, -1)
            for row in rows:
                row[:] = (entries + row.size / 2) * fragments // START.size
                entries += row.size
    else:  # kernel's rows, if they are layers, first; then the largest first
        load = np.zeros(fragments)
        unlayered = sorted(leaves, key=lambda name: -leaves[name].size)
        if layered:
            unlayered.remove("kernel")
            for number, layer in enumerate(leaves["kernel"]):
                layer[:] = number % fragments
                load[number % fragments] += layer.size
        for name in unlayered:
            leaves[name][...] = np.argmin(load)
            load[np.argmin(load)] += leaves[name].size
    return np.concatenate([leaf.ravel() for leaf in leaves.values()])


def recurrence(
    workers,
    period,
    fragments=4,
    outer_lr=0.7,
    outer_momentum=0.9,
    delay=0,
    alpha=0.0,
    cut="leaves",
    layered=None,
):
    anchor = START
    velocity = np.zeros_like(START)
    fragment = fragment_of_entries(fragments, cut, layered)
    messages = {}
    for step, theta in local_steps(workers):
        for f in range(fragments):
            inside = fragment == f
            since_arrival = step + 1 - (f + 1) * period // fragments
            if (since_arrival + delay) % period == 0:
                messages[f] = anchor - mean(theta)
            if since_arrival % period == 0:
                pseudo_gradient = np.where(inside, messages[f], 0)
                new = outer_momentum * velocity + pseudo_gradient
                velocity = np.where(inside, new, velocity)
                new = anchor - outer_lr * (pseudo_gradient + outer_momentum * velocity)
                anchor = np.where(inside, new, anchor)
                for i in range(workers):
                    mixed = (1 - alpha) * anchor + alpha * theta[i]
                    theta[i] = np.where(inside, mixed, theta[i])
        yield anchor, theta
