"""Miahi and Belilovsky 2026, PULSELoCo, as in the authors' code (version 6).

Messages of a fixed length are not theirs: at density 1 all that changes is sent.
"""

import numpy as np

from recurrences import PERIOD, START, local_steps, mean
from recurrences.topk_sgd import top_k

# At a slow outer rate more of the moves stay below what bfloat16 shows.
SETTINGS = [
    {"period": PERIOD, "density": 1.0},
    {"period": 1, "density": 1.0, "outer_lr": 0.05, "outer_momentum": 0.5},
    {"period": PERIOD, "density": 0.4},
    {"period": 1, "density": 0.2, "outer_lr": 0.05, "outer_momentum": 0.5},
]


def bfloat16(x):
    """Rounds to 8 bits, to even between two, by the bits of float32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def recurrence(workers, period, density, outer_lr=0.7, outer_momentum=0.9):
    anchor = START
    velocity = np.zeros_like(START)
    residual = [np.zeros_like(START)] * workers
    for step, theta in local_steps(workers):
        if (step + 1) % period == 0:
            messages = []
            for i in range(workers):
                s = residual[i] + anchor - theta[i]
                gate = bfloat16(anchor) != bfloat16(anchor - s)
                d = np.where(gate, s, 0)
                messages.append(d if density == 1 else top_k(d, density))
                residual[i] = s - messages[i]
            pseudo_gradient = mean(messages)
            velocity = outer_momentum * velocity + pseudo_gradient
            look_ahead = pseudo_gradient + outer_momentum * velocity
            anchor = anchor - outer_lr * look_ahead
            theta[:] = [anchor] * workers
        yield anchor, theta
