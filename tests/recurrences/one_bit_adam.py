"""Tang 2021, algorithm 1, at a scale of the mean magnitude of each part of a leaf."""

import numpy as np

from recurrences import START, by_leaf, in_step, mean, split_leaf

# Once v is frozen this problem needs shorter steps than 1 / √v: a large ε, or a bound.
SETTINGS = [
    {"dense_steps": 6, "b1": 0.6, "b2": 0.9, "eps": 0.4},
    {"dense_steps": 4, "eps": 1.0},
    ({"dense_steps": 3, "b2": 0.9}, {"bounded": True}),
    {},
]


def longest_step(b1, b2):
    """The largest |m| / √v that Adam's moments can have: by Cauchy and Schwarz."""
    return (1 - b1) / np.sqrt((1 - b2) * (1 - b1**2 / b2))


def scaled_sign(x):
    return np.mean(np.abs(x)) * np.sign(x) if x.size else x


def compressed(x, workers):
    """C(x), by the workers' parts of each leaf."""

    def of_leaf(number, leaf):
        return np.concatenate([scaled_sign(c) for c in split_leaf(leaf, workers)])

    return by_leaf(of_leaf, x)


def recurrence(workers, dense_steps=100, b1=0.9, b2=0.999, eps=1e-8, bounded=False):
    """`bounded`: an entry's step is at most Adam's longest."""
    bound = longest_step(b1, b2) if bounded else np.inf
    m, v, server = (np.zeros_like(START) for _ in range(3))
    e = np.zeros((workers, START.size))

    def combine(grads, theta, step):
        g = np.array(grads)
        if step < dense_steps:
            m[:] = b1 * m + (1 - b1) * mean(g)
            v[:] = b2 * v + (1 - b2) * mean(g) ** 2
        else:
            x = b1 * m + (1 - b1) * g + e
            messages = np.array([compressed(vector, workers) for vector in x])
            e[:] = x - messages
            y = mean(messages) + server
            m[:] = compressed(y, workers)
            server[:] = y - m
        return [np.clip(m / (np.sqrt(v) + eps), -bound, bound)] * workers

    return in_step(workers, combine)
