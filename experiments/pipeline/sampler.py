"""The global batch stream, a function of (seed, step) alone."""

from collections.abc import Callable, Sequence
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


def rows_of_shards(
    seed: int, first: int, steps: int, batch: int, shards: Sequence[np.ndarray]
) -> np.ndarray:
    """As `rows`, where each worker draws from its own examples alone.

    The w-th of as many equal slices of a global batch comes from shards[w], whose
    stream is one fresh permutation of the shard after the other. A worker takes
    batch / workers examples a step however many it has: a small shard comes round
    sooner, and each of its examples counts for more than one of a large shard.

    Args:
        seed: of the permutations; each worker's own are drawn from it.
        first: the first local step, from 0.
        steps: how many.
        batch: the global batch, a multiple of the workers.
        shards: of each worker, which examples are its own (see `partition.shards`).

    Returns:
        Integers, (steps, batch).

    Raises:
        ValueError: a batch that the workers do not divide.
    """
    workers = len(shards)
    own, rest = divmod(batch, workers)
    if rest:
        raise ValueError(f"batch of {batch} does not divide over {workers} shards")
    order = _orders(seed, workers)
    slices = np.empty((steps, workers, own), np.int32)
    for worker, shard in enumerate(shards):
        length = _epochs_at_once(len(shard)) * len(shard)
        start, end = first * own, (first + steps) * own
        parts = range(start // length, -(-end // length))
        stream = [order(worker, part, len(shard)) for part in parts]
        start -= parts.start * length
        places = np.concatenate(stream)[start : start + steps * own]
        slices[:, worker] = shard[places].reshape(steps, own)
    return slices.reshape(steps, batch)


@lru_cache(maxsize=8)  # runs of several seeds take turns
def _orders(seed: int, workers: int) -> Callable[[int, int, int], np.ndarray]:
    """(worker, part, examples) -> places in a shard, which are not to be written to.

    It keeps two parts of each worker, which finds its own again at the next dispatch:
    about twice the examples in all.
    """

    @lru_cache(maxsize=2 * workers)
    def order(worker, part, examples):
        epochs = np.tile(
            np.arange(examples, dtype=np.int32), (_epochs_at_once(examples), 1)
        )
        # A spawn key, unlike more entropy, never gives what `_epoch` draws.
        key = np.random.SeedSequence(seed, spawn_key=(worker, part))
        places = np.random.default_rng(key).permuted(epochs, axis=1).reshape(-1)
        places.setflags(write=False)
        return places

    return order


def _epochs_at_once(examples: int) -> int:
    """Epochs of a part: a generator takes as long to start as 1000 places to draw."""
    return max(1, 1000 // examples)


@lru_cache(maxsize=4)  # of long epochs each dispatch takes a small part
def _epoch(seed: int, epoch: int, examples: int) -> np.ndarray:
    """The order of an epoch's examples, which is not to be written to."""
    order = np.random.default_rng([seed, epoch]).permutation(examples)
    order.setflags(write=False)
    return order
