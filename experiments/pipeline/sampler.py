"""The sampler: global batches as a function of (seed, step) alone."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np


def rows(seed: int, first: int, steps: int, batch: int, examples: int) -> np.ndarray:
    """Samples the global batches of steps first … first + steps - 1.

    One permutation of the examples follows the other, cut into batches: each epoch
    takes every example once, even if a batch lies over its end.

    Args:
        seed: for the permutations.
        first: the first local step, from 0.
        steps: the number of steps.
        batch: the global batch.
        examples: the number of training examples.

    Returns:
        Numbers of examples, (steps, batch).
    """
    # From seed and step alone: any split into dispatches, any algorithm and a resumed
    # run see the same batches.
    epoch = partial(_epoch, seed, examples)
    found = _stretch(first * batch, steps * batch, examples, epoch)
    return found.astype(np.int32).reshape(steps, batch)


def rows_of_shards(
    seed: int, first: int, steps: int, batch: int, shards: Sequence[np.ndarray]
) -> np.ndarray:
    """Samples like `rows`, each worker from its own examples.

    The w-th slice of a global batch comes from shards[w], one permutation of the shard
    after the other. A worker takes batch / workers examples a step, whatever the size
    of its shard: an example of a small shard counts for more than one of a large one.

    Args:
        seed: for the permutations; each worker's own are drawn from it.
        first: the first local step, from 0.
        steps: the number of steps.
        batch: the global batch, a multiple of the workers.
        shards: the numbers of each worker's examples (see `partition.shards`).

    Returns:
        Numbers of examples, (steps, batch).

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
        part = partial(order, worker, len(shard))
        places = _stretch(first * own, steps * own, length, part)
        slices[:, worker] = shard[places].reshape(steps, own)
    return slices.reshape(steps, batch)


def _stretch(
    start: int, count: int, length: int, part: Callable[[int], np.ndarray]
) -> np.ndarray:
    """Returns `count` places from `start` on in parts of one length, end to end."""
    parts = range(start // length, -(-(start + count) // length))
    stream = np.concatenate([part(number) for number in parts])
    start -= parts.start * length
    return stream[start : start + count]


# Runs of several seeds take turns.
@lru_cache(maxsize=8)
def _orders(seed: int, workers: int) -> Callable[[int, int, int], np.ndarray]:
    """Returns (worker, examples, part) -> places in a shard, which are read-only."""

    # Two parts of each worker, which finds its own again at the next dispatch: about
    # twice the examples in all.
    @lru_cache(maxsize=2 * workers)
    def order(worker, examples, part):
        epochs = np.tile(
            np.arange(examples, dtype=np.int32), (_epochs_at_once(examples), 1)
        )
        # A spawn key, unlike more entropy, never gives the draws of `_epoch`.
        key = np.random.SeedSequence(seed, spawn_key=(worker, part))
        places = np.random.default_rng(key).permuted(epochs, axis=1).reshape(-1)
        places.setflags(write=False)
        return places

    return order


def _epochs_at_once(examples: int) -> int:
    """The number of epochs in a part."""
    # A generator takes as long to start as to draw 1000 places.
    return max(1, 1000 // examples)


# Each dispatch takes a small part of a long epoch.
@lru_cache(maxsize=4)
def _epoch(seed: int, examples: int, epoch: int) -> np.ndarray:
    """The order of an epoch's examples, which is read-only."""
    order = np.random.default_rng([seed, epoch]).permutation(examples)
    order.setflags(write=False)
    return order
