"""Asif et al. 2026, equations 5 to 19: a server that turns updates, by events in order.

Workers' speeds fall evenly, in 1024ths; the clock is the first one's local step. What
the algorithm does to a block of the model is done to each leaf.
"""

import numpy as np

from recurrences import PERIOD, START, by_leaf, local_steps

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
    size, along = np.linalg.norm(delta), np.linalg.norm(m)
    if size < epsilon or along < epsilon:
        return delta
    u, v = delta / size, m / along
    cosine = np.sum(u * v)
    conf = size / (size + kappa * along + epsilon)
    if cosine >= aligned:
        return delta
    if cosine < 0:
        beta = min(shrink * -cosine * conf, cap)
        return delta - beta * cosine * size * v
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
    lost, others = 1024 - round(1024 * slowest), max(workers - 1, 1)
    speeds = [1024 - lost * i // others for i in range(workers)]
    periods = [period * s // 1024 if dynamic_steps else period for s in speeds]
    weight = workers**-0.5 if arrival_weight is None else arrival_weight
    numbers = aligned, shrink, turn
    server, m = START, np.zeros_like(START)
    start, held = [START] * workers, [START] * workers
    for step, theta in local_steps(workers):
        for i in range(workers):
            before, now = step * speeds[i] // 1024, (step + 1) * speeds[i] // 1024
            if now == before:
                theta[i] = held[i]
            elif now % periods[i] == 0:
                delta = start[i] - theta[i]
                turned = by_leaf(lambda _, d, v: corrected(d, v, *numbers), delta, m)
                m = outer_momentum * m + (1 - outer_momentum) * weight * turned
                server = server - outer_lr * (weight * turned + outer_momentum * m)
                theta[i] = start[i] = server - outer_lr * outer_momentum * m
        held = list(theta)
        yield server, theta
