"""Training data that stays on the host, read ahead while the devices train."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from experiments.tasks.task import Arrays, Source

THREADS, AHEAD = 2, 2  # reading threads, and dispatches read before they are asked for


class _Dispatches:
    """The batches of each dispatch of a run, as grain reads them."""

    def __init__(
        self,
        train: Arrays | Source,
        dispatches: Sequence[tuple[int, int]],
        rows: Callable[[int, int], np.ndarray],
    ):
        self.train, self.dispatches, self.rows = train, dispatches, rows

    def __len__(self) -> int:
        return len(self.dispatches)

    def __getitem__(self, index: int) -> Arrays:
        return gather(self.train, self.rows(*self.dispatches[index]))


def read_ahead(
    train: Arrays | Source,
    dispatches: Sequence[tuple[int, int]],
    rows: Callable[[int, int], np.ndarray],
) -> Iterator[Arrays]:
    """Yields the batches of one dispatch after the other, read by grain's threads.

    Args:
        train: the examples.
        dispatches: (first step, steps) of each.
        rows: (first step, steps) -> which examples, (steps, batch).

    Returns:
        Leaves (steps, batch, ...), in the order of the dispatches.
    """
    import grain  # a second

    dataset = grain.MapDataset.source(_Dispatches(train, dispatches, rows))
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
    return iter(dataset.to_iter_dataset(options))


def gather(train: Arrays | Source, rows: np.ndarray) -> Arrays:
    """The examples that rows name, stacked: leaves (*rows.shape, ...)."""
    if isinstance(train, dict):
        return {name: x[rows] for name, x in train.items()}
    examples = [train[int(number)] for number in rows.reshape(-1)]
    return {
        name: np.stack([example[name] for example in examples]).reshape(
            *rows.shape, *np.shape(first)
        )
        for name, first in examples[0].items()
    }
