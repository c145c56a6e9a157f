"""Prefetching: batches of host data are read while the devices train."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from experiments.cli.errors import BadRequest, MayPass, explain
from experiments.tasks.task import Arrays, Source

THREADS, AHEAD = 2, 2  # reading threads, and dispatches that are read in advance
_LASTING = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


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
    """Stacks the examples of these numbers: leaves (*rows.shape, ...).

    Raises:
        BadRequest: an example that cannot be read, or of another form than others.
    """
    if isinstance(train, dict):
        return {name: x[rows] for name, x in train.items()}
    numbers = rows.reshape(-1).tolist()
    examples = [read(train, number) for number in numbers]
    forms = [{name: np.shape(x) for name, x in each.items()} for each in examples]
    if any(form != forms[0] for form in forms):
        usual = max(forms, key=forms.count)
        odd = next(i for i, form in enumerate(forms) if form != usual)
        raise BadRequest(
            f"training example {numbers[odd]} has shapes {forms[odd]}, but example "
            f"{numbers[forms.index(usual)]} {usual}"
        )
    return {
        name: np.stack([example[name] for example in examples]).reshape(
            *rows.shape, *np.shape(first)
        )
        for name, first in examples[0].items()
    }


def read(source: Source, number: int) -> Mapping[str, np.ndarray]:
    """Reads one example of a source.

    Raises:
        BadRequest: it cannot be read; MayPass if it may be later.
    """
    try:
        return source[number]
    except BadRequest:
        raise
    except Exception as error:  # a user's source may raise anything
        refused = explain(f"training example {number}", error)
        if isinstance(error, OSError) and not isinstance(error, _LASTING):
            raise MayPass(str(refused)) from error
        raise refused from error
