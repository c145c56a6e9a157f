"""Asif et al. 2026, equations 5 to 19: a server that turns updates, by events in order.

Workers' speeds fall evenly, in 1024ths; the clock is the first one's local step. What
the algorithm does to a block of the model is done to each leaf.
"""

import numpy as np

from recurrences import PERIOD, START, by_leaf
from recurrences.async_diloco import arrivals

SETTINGS = [
    {
        "period": 3,
        "slowest": 0.3,
        "outer_lr": 0.7,
        "outer_momentum": 0.6,
        "aligned": 0.9,
        "shrink": 0.8,
        "turn": 0.4,
    },
    {"period": PERIOD},
    {"period": 5, "slowest": 0.25, "dynamic_steps": True, "arrival_weight": 1.0},
    {"period": 2, "slowest": 1.0, "aligned": 0.9, "shrink": 0.8, "turn": 0.4},
    {"period": 2, "aligned": 0.6, "shrink": 4.0, "turn": 3.0},
]


def corrected(delta, m, aligned, shrink, turn, kappa=3, cap=0.5, epsilon=1e-8):
    """The update's block after algorithm 2, with weight 1, and table 3's κ and cap."""
    size = np.linalg.norm(delta)
    along = np.linalg.norm(m)
    if size < epsilon or along < epsilon:
        return delta
    u = delta / size
    v = m / along
    cosine = np.sum(u * v)
    conf = size / (size + kappa * along + epsilon)
    if cosine >= aligned:
        return delta
    if cosine < 0:
        return delta - min(shrink * -cosine * conf, cap) * cosine * size * v
    part = min(turn * (1 - cosine) * conf, 1)
    mixed = (1 - part) * u + part * v
    return size * mixed / max(np.linalg.norm(mixed), epsilon)


def recurrence(
    workers,
    period,
    outer_lr=0.3,
    outer_momentum=0.9,
    arrival_weight=None,
    aligned=0.2,
    shrink=0.5,
    turn=1.0,
    slowest=0.5,
    dynamic_steps=False,
):
    weight = workers**-0.5 if arrival_weight is None else arrival_weight
    numbers = aligned, shrink, turn
    server = START
    m = np.zeros_like(START)
    start = [START] * workers
    for _, theta, ended in arrivals(workers, period, slowest, dynamic_steps):
        for i in ended:
            delta = start[i] - theta[i]
            turned = by_leaf(lambda _, d, v: corrected(d, v, *numbers), delta, m)
            m = outer_momentum * m + (1 - outer_momentum) * weight * turned
            server = server - outer_lr * (weight * turned + outer_momentum * m)
            theta[i] = start[i] = server - outer_lr * outer_momentum * m
        yield server, theta
