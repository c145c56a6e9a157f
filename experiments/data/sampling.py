"""Sampling: the examples of each step, as a function of (seed, step) alone."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np

from syncalgos import checks

LEAST = 10  # the fewest examples of a shard in a Dirichlet partition
DRAWS = 1000  # tries of a Dirichlet partition before an error


def rows(
    seed: int, first_step: int, steps: int, batch: int, examples: int
) -> np.ndarray:
    """Samples the global batches of steps first_step … first_step + steps - 1.

    Permutations of the examples follow each other and are cut into batches. Each epoch
    contains every example once, even if a batch crosses its end.

    Args:
        seed: the seed for the permutations.
        first_step: the first local step, from 0.
        steps: the number of steps.
        batch: the global batch size.
        examples: the number of training examples.

    Returns:
        Numbers of examples, (steps, batch).
    """
    # Batches depend on seed and step only, so that they are the same for any split into
    # dispatches, any algorithm and a resumed run.
    epoch = partial(_epoch, seed, examples)
    row_numbers = _stretch(first_step * batch, steps * batch, examples, epoch)
    return row_numbers.astype(np.int32).reshape(steps, batch)


def rows_of_shards(
    seed: int, first_step: int, steps: int, batch: int, shards: Sequence[np.ndarray]
) -> np.ndarray:
    """Samples like `rows`, but each worker from its own examples.

    The w-th slice of a global batch comes from shards[w], in consecutive permutations
    of the shard. Each worker takes batch / workers examples per step, whatever the size
    of its shard, so that examples of a small shard count more.

    Args:
        seed: the seed from which all workers' permutations are drawn.
        first_step: the first local step, from 0.
        steps: the number of steps.
        batch: the global batch size, a multiple of the number of workers.
        shards: the numbers of each worker's examples (see `partition.shards`).

    Returns:
        Numbers of examples, (steps, batch).
    """
    workers = len(shards)
    worker_batch = batch // workers
    order = _orders(seed, workers)
    slices = np.empty((steps, workers, worker_batch), np.int32)
    for worker, shard in enumerate(shards):
        length = _epochs_at_once(len(shard)) * len(shard)
        part = partial(order, worker, len(shard))
        places = _stretch(first_step * worker_batch, steps * worker_batch, length, part)
        slices[:, worker] = shard[places].reshape(steps, worker_batch)
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
        numbers = np.arange(examples, dtype=np.int32)
        epochs = np.tile(numbers, (_epochs_at_once(examples), 1))
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


def shards(
    kind: str, groups: Mapping[str, np.ndarray], examples: int, workers: int, seed: int
) -> list[np.ndarray] | None:
    """Assigns each training example to one worker.

    - iid: no shards; all workers share one stream of all examples.
    - a group's name, such as label or speaker: the examples are ordered by group and
      cut into equal parts, one for each worker, so that a worker has few groups. The
      order of groups, and the order within a group, are random.
    - dirichlet:ALPHA: the workers' shares of each label are drawn from Dir(ALPHA, …,
      ALPHA). Near 0, one worker has all of a label; far above 1, all have the same
      share. Draws repeat until every worker has 10 examples. Shards differ in size.

    Args:
        kind: one of the above.
        groups: the number of each example's group, (examples,), by name.
        examples: the number of training examples.
        workers: the number of workers.
        seed: the seed for the draws.

    Returns:
        The numbers of each worker's examples, in no particular order; None for iid.

    Raises:
        ValueError: the kind is unknown, the examples lack the group, or there are too
            few examples.

    Source: Yurochkin et al., "Bayesian nonparametric federated learning of neural
    networks", ICML 2019, which draws shares of each label; Hsu, Qi and Brown,
    "Measuring the effects of non-identical data distribution for federated visual
    classification", 2019, which draws labels of each worker.
    """
    alpha = find_alpha(kind)
    if kind == "iid":
        return None
    needed = kind if alpha is None else "label"
    if needed not in groups:
        kinds = ["iid", *groups, *(["dirichlet:ALPHA"] if "label" in groups else [])]
        raise ValueError(
            f"--partition {kind}: these examples are not grouped by {needed}"
            f"{checks.nearest(needed, kinds)} (possible here: {', '.join(kinds)})"
        )
    least = 1 if alpha is None else LEAST
    if examples < least * workers:
        raise ValueError(
            f"--partition {kind}: {examples} examples are too few for {workers} "
            f"workers with at least {least} each: use at most {examples // least}"
        )
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    _, group, sizes = np.unique(groups[needed], return_inverse=True, return_counts=True)
    order = rng.permutation(examples)
    if alpha is None:
        rank = rng.permutation(len(sizes))[group]
        return np.array_split(order[np.argsort(rank[order], kind="stable")], workers)
    order = order[np.argsort(group[order], kind="stable")]
    counts = _dirichlet(alpha, sizes, workers, rng)
    owner = np.repeat(np.tile(np.arange(workers), len(sizes)), counts.ravel())
    return [order[owner == worker] for worker in range(workers)]


def _dirichlet(
    alpha: float, sizes: np.ndarray, workers: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws the number of examples of each label for each worker, (labels, workers)."""
    for _ in range(DRAWS):
        shares = rng.dirichlet(np.full(workers, alpha), len(sizes))
        ends = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(int)
        # Sums of shares may round to slightly less.
        ends[:, -1] = sizes
        counts = np.diff(ends, axis=1, prepend=0)
        if counts.sum(axis=0).min() >= LEAST:
            return counts
    raise ValueError(
        f"--partition dirichlet:{alpha:g}: in each of {DRAWS} draws one of the "
        f"{workers} workers had fewer than {LEAST} examples: use a larger ALPHA or "
        "fewer workers"
    )


def find_alpha(kind: str) -> float | None:
    """Returns the ALPHA of a Dirichlet partition, and None for others.

    Args:
        kind: iid, dirichlet:ALPHA, or a group's name. `shards` checks that the data has
            the group.

    Raises:
        ValueError: the kind has another form.
    """
    name, colon, text = kind.partition(":")
    if name == "dirichlet":
        alpha: Any = text
        with suppress(ValueError):
            alpha = float(text)
        return checks.real(
            "--partition dirichlet:ALPHA: ALPHA", alpha, above=0, below=1e9
        )
    if colon or not name.isidentifier():
        nearest = checks.nearest(f"{name}:", ["iid", "dirichlet"])  # iid:3 is near iid
        raise ValueError(
            f"unknown --partition {kind!r}{nearest} (one of: iid, dirichlet:ALPHA such "
            "as dirichlet:0.1, or a group of the task such as label or speaker)"
        )
    return None
