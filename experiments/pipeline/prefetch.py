"""Prefetching: batches of host data are read while the devices train."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from experiments.tasks.task import Arrays, Source

THREADS, AHEAD = 2, 2  # reading threads, and dispatches that are read in advance


def read_ahead(
    train: Arrays | Source,
    dispatches: Sequence[tuple[int, int]],
    rows: Callable[[int, int], np.ndarray],
) -> Iterator[Arrays]:
    """Yields the batches of one dispatch after the other, read by grain's threads.

    Args:
        train: the examples.
        dispatches: (first step, steps) of each.
        rows: (first step, steps) -> the numbers of the examples, (steps, batch).

    Returns:
        Leaves (steps, batch, ...), in the order of the dispatches.
    """
    # Its import takes a second, which data on the devices need not wait for.
    import grain

    # One item a dispatch, in the sampler's order: host-fed runs have the same bits as
    # runs whose data lies on the devices.
    source = grain.MapDataset.source(dispatches)
    batches = source.map(lambda dispatch: gather(train, rows(*dispatch)))
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
    return iter(batches.to_iter_dataset(options))


def gather(train: Arrays | Source, rows: np.ndarray) -> Arrays:
    """Stacks the examples of these numbers: leaves (*rows.shape, ...)."""
    if isinstance(train, dict):
        return {name: x[rows] for name, x in train.items()}
    examples = [train[int(number)] for number in rows.reshape(-1)]
    return {
        name: np.stack([example[name] for example in examples]).reshape(
            *rows.shape, *np.shape(first)
        )
        for name, first in examples[0].items()
    }
