"""The sampler: global batches as a function of (seed, step) alone."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np


def rows(seed: int, first: int, steps: int, batch: int, examples: int) -> np.ndarray:
    """Samples the global batches of steps first … first + steps - 1.

    Permutations of the examples follow each other and are cut into batches. Each epoch
    contains every example once, even if a batch crosses its end.

    Args:
        seed: the seed for the permutations.
        first: the first local step, from 0.
        steps: the number of steps.
        batch: the global batch size.
        examples: the number of training examples.

    Returns:
        Numbers of examples, (steps, batch).
    """
    # Batches depend on seed and step only, so that they are the same for any split into
    # dispatches, any algorithm and a resumed run.
    epoch = partial(_epoch, seed, examples)
    found = _stretch(first * batch, steps * batch, examples, epoch)
    return found.astype(np.int32).reshape(steps, batch)


def rows_of_shards(
    seed: int, first: int, steps: int, batch: int, shards: Sequence[np.ndarray]
) -> np.ndarray:
    """Samples like `rows`, but each worker from its own examples.

    The w-th slice of a global batch comes from shards[w], in consecutive permutations
    of the shard. Each worker takes batch / workers examples per step, whatever the size
    of its shard, so that examples of a small shard count more.

    Args:
        seed: the seed from which all workers' permutations are drawn.
        first: the first local step, from 0.
        steps: the number of steps.
        batch: the global batch size, a multiple of the number of workers.
        shards: the numbers of each worker's examples (see `partition.shards`).

    Returns:
        Numbers of examples, (steps, batch).

    Raises:
        ValueError: the workers do not divide the batch.
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
    """Returns `count` places from `start` on, in a sequence of parts of one length."""
    parts = range(start // length, -(-(start + count) // length))
    stream = np.concatenate([part(number) for number in parts])
    start -= parts.start * length
    return stream[start : start + count]


# A cache for several seeds, as their runs may alternate.
@lru_cache(maxsize=8)
def _orders(seed: int, workers: int) -> Callable[[int, int, int], np.ndarray]:
    """Returns a function of (worker, examples, part) that gives places in a shard."""

    # Two parts for each worker, which uses them again at the next dispatch. In all they
    # hold about twice the examples.
    @lru_cache(maxsize=2 * workers)
    def order(worker, examples, part):
        epochs = np.tile(
            np.arange(examples, dtype=np.int32), (_epochs_at_once(examples), 1)
        )
        # A spawn key, unlike more entropy, cannot repeat the draws of `_epoch`.
        key = np.random.SeedSequence(seed, spawn_key=(worker, part))
        places = np.random.default_rng(key).permuted(epochs, axis=1).reshape(-1)
        places.setflags(write=False)
        return places

    return order


def _epochs_at_once(examples: int) -> int:
    """Returns the number of epochs in a part."""
    # Starting a generator takes as long as drawing 1000 places.
    return max(1, 1000 // examples)


# Each dispatch uses a small part of a long epoch.
@lru_cache(maxsize=4)
def _epoch(seed: int, examples: int, epoch: int) -> np.ndarray:
    """Returns the order of an epoch's examples, read-only."""
    order = np.random.default_rng([seed, epoch]).permutation(examples)
    order.setflags(write=False)
    return order
