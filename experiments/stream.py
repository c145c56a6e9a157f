"""The global batch stream, a function of (seed, step) alone."""

from functools import lru_cache

import numpy as np


def rows(seed: int, first: int, steps: int, batch: int, examples: int) -> np.ndarray:
    """Which examples the global batches of steps first … first + steps - 1 hold.

    The stream is one fresh permutation of the examples after the other, cut into
    batches: each epoch takes every example once, also where a batch lies over its end.

    Args:
        seed: of the permutations.
        first: the first local step, from 0.
        steps: how many.
        batch: the global batch.
        examples: of the training data.

    Returns:
        Integers, (steps, batch).
    """
    start, end = first * batch, (first + steps) * batch
    epochs = range(start // examples, -(-end // examples))
    stream = np.concatenate([_epoch(seed, epoch, examples) for epoch in epochs])
    start -= epochs.start * examples
    return stream[start : start + steps * batch].astype(np.int32).reshape(steps, batch)


@lru_cache(maxsize=4)  # of long epochs each dispatch takes a small part
def _epoch(seed: int, epoch: int, examples: int) -> np.ndarray:
    """The order of an epoch's examples, which is not to be written to."""
    order = np.random.default_rng([seed, epoch]).permutation(examples)
    order.setflags(write=False)
    return order
