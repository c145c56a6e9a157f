"""Douillard et al. 2026, algorithm 1: a syncer that merges fragment after fragment.

Workers' speeds fall evenly, in 1024ths; the clock is the first one's local step. A
fragment is due every `period` steps of it. A worker answers as it next ends a local
step; the syncer waits for `quorum` answers, then `grace` steps for others.
"""

import numpy as np

from recurrences import PERIOD, START, by_leaf, local_steps
from recurrences.async_diloco import worker_speeds
from recurrences.streaming_diloco import fragment_of_entries

SETTINGS = [
    {"period": 2, "fragments": 2, "slowest": 0.2, "quorum": 2, "grace": 2},
    {"period": PERIOD},
    {"period": 6, "fragments": 2, "slowest": 0.3, "outer_lr": 0.4, "grace": 0},
    {"period": 4, "fragments": 1, "slowest": 0.25, "quorum": 3, "outer_momentum": 0.5},
    {"period": 6, "fragments": 3, "slowest": 0.2, "quorum": 9, "radial": True},
    {
        "period": 4,
        "fragments": 2,
        "layered": {"bias": 0, "kernel": 1, "readout": 0, "scale": 0},
    },
]
ACTS_ON_LEAVES = True


def mean_of_directions(moves, weights):
    """The mean of norms along the mean of directions, of a leaf."""
    norms = [np.linalg.norm(x) for x in moves]
    along = np.zeros_like(moves[0])
    for x, norm, w in zip(moves, norms, weights, strict=True):
        if norm:
            along = along + w * x / norm
    if not np.any(along):
        return along
    mean_norm = sum(w * norm for norm, w in zip(norms, weights, strict=True))
    return mean_norm * along / np.linalg.norm(along)


class Fragment:
    """A fragment's model and momentum at the syncer, and who has answered."""

    def __init__(self, inside, first_step, period, workers):
        self.inside = inside
        self.first_step = first_step
        self.period = period
        self.m = np.zeros_like(START)
        self.due_step = None
        self.at_quorum = None
        self.steps = np.zeros(workers)
        self.answered = np.zeros(workers, bool)

    def ends(self, step, moved, quorum, grace):
        """Takes a step's answers; returns whether the syncer merges now."""
        self.steps += moved
        if step >= self.first_step and (step - self.first_step) % self.period == 0:
            self.due_step = step
            self.at_quorum = None
            self.answered[:] = False
        if self.due_step is None:
            return False
        self.answered |= moved
        if self.at_quorum is None and self.answered.sum() >= quorum:
            self.at_quorum = step
        in_time = self.at_quorum is None or step < self.at_quorum + grace
        is_last = step == self.due_step + self.period - 1  # before it is due again
        return not in_time or self.answered.all() or is_last

    def weights(self):
        """c_tok² / c_steps, as shares: tokens are in proportion to steps."""
        w = np.where(self.answered, self.steps, 0)
        self.due_step = None
        self.steps = np.zeros_like(self.steps)
        return w / w.sum()


def recurrence(
    workers,
    period,
    fragments=4,
    outer_lr=0.7,
    outer_momentum=0.9,
    quorum=1,
    grace=1,
    radial=False,
    slowest=0.5,
    layered=None,
):
    speeds = np.array(worker_speeds(workers, slowest))
    number = fragment_of_entries(fragments, "layers", layered)
    spacing = period // fragments
    parts = [
        Fragment(number == f, (f + 1) * spacing - 1, period, workers)
        for f in range(fragments)
    ]
    model = START
    old_theta = [START] * workers
    for step, theta in local_steps(workers):
        moved = (step + 1) * speeds // 1024 > step * speeds // 1024
        theta[:] = [theta[i] if moved[i] else old_theta[i] for i in range(workers)]
        for part in parts:
            if not part.ends(step, moved, min(quorum, workers), grace):
                continue
            w = part.weights()
            moves = [np.where(part.inside, model - x, 0) for x in theta]
            delta = sum(a * x for a, x in zip(w, moves, strict=True))
            if radial:
                delta = by_leaf(lambda _, *x, w=w: mean_of_directions(x, w), *moves)
            part.m = outer_momentum * part.m + delta
            model = model - outer_lr * (delta + outer_momentum * part.m)
            theta[:] = [np.where(part.inside, model, x) for x in theta]
        old_theta = list(theta)
        yield model, theta
