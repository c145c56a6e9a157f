"""Peng 2024, algorithm 1: decoupled momentum, by chunks of the leaves."""

from functools import reduce
from itertools import product

import numpy as np
from support.problems import SHAPES

from recurrences import LR, START, falling, in_step, rate
from recurrences.topk_sgd import largest

AS_THE_AUTHORS = {"over_senders": True}
SETTINGS = [
    ({"decay": 0.9, "chunk": 4, "top_k": 3}, AS_THE_AUTHORS),
    {},  # all components are sent by all
    ({"decay": 0.8, "chunk": 3, "top_k": 1}, AS_THE_AUTHORS),
    ({"decay": 0.9, "chunk": 2, "top_k": 2, "sign": True}, AS_THE_AUTHORS),
    (
        {"decay": 0.9, "top_k": 3, "sign": True, "learning_rate": falling},
        AS_THE_AUTHORS,
    ),
    ({"decay": 0.9, "top_k": 3, "learning_rate": LR}, AS_THE_AUTHORS),
]
SIGN = {"decay": 0.9, "chunk": 4, "top_k": 3, "sign": True, "learning_rate": LR}
VARIANTS = {"sign": (SIGN, AS_THE_AUTHORS)}
ACTS_ON_LEAVES = True


def cosines(side):
    """The orthonormal DCT-II as a matrix."""
    k = np.arange(side)[:, None]
    n = np.arange(side)
    dct = np.sqrt(2 / side) * np.cos(np.pi * (n + 0.5) * k / side)
    dct[0] /= np.sqrt(2)
    return dct


def largest_divisor(length, limit):
    return max(d for d in range(1, length + 1) if length % d == 0 and d <= limit)


def chunks(longest):
    """Yields the places of each chunk's entries in a model, and its DCT."""
    start = 0
    for shape in SHAPES.values():
        places = start + np.arange(np.prod(shape, dtype=int)).reshape(shape)
        start += places.size
        sides = [largest_divisor(n, longest) for n in shape]
        dct = reduce(np.kron, [cosines(side) for side in sides], np.eye(1))
        corners = product(*(range(0, n, s) for n, s in zip(shape, sides, strict=True)))
        for corner in corners:
            block = [slice(a, a + s) for a, s in zip(corner, sides, strict=True)]
            yield places[tuple(block)].ravel(), dct


def recurrence(
    workers,
    decay=0.999,
    chunk=64,
    top_k=32,
    sign=False,
    learning_rate=None,
    over_senders=False,
):
    """`over_senders`: a component's mean is over the workers that sent it."""
    momentum = np.zeros((workers, START.size))

    def combine(grads, theta, step):
        accumulates_steps = sign and learning_rate is not None
        scale = rate(learning_rate, step) if accumulates_steps else 1
        momentum[:] = decay * momentum + scale * np.array(grads)
        g = np.zeros_like(START)
        for places, dct in chunks(chunk):
            total = np.zeros(places.size)
            senders = np.zeros(places.size)
            for m in momentum:
                components = dct @ m[places]
                fast = largest(components, top_k)
                total[fast] += components[fast]
                senders[fast] += 1
                m[places] -= dct[fast].T @ components[fast]
            count = np.maximum(senders, 1) if over_senders else workers
            g[places] = dct.T @ (total / count)
        return [np.sign(g) if sign else g] * workers

    steps = LR if learning_rate is None else learning_rate
    return in_step(workers, combine, steps)
