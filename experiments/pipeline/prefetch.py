"""Reads batches of host data while the devices train."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from experiments.cli.errors import STOPS, BadRequest, MayPass, explain
from experiments.tasks.task import Arrays, Source
from syncalgos import checks

THREADS, AHEAD = 2, 2  # reading threads, and dispatches read in advance
_LASTING = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def read_ahead(
    train: Arrays | Source,
    dispatches: Sequence[tuple[int, int]],
    rows: Callable[[int, int], np.ndarray],
) -> Iterator[Arrays]:
    """Yields the batches of one dispatch after another, read by grain's threads.

    Args:
        train: the examples.
        dispatches: (first step, steps) of each dispatch.
        rows: maps (first step, steps) to the numbers of the examples, (steps, batch).

    Returns:
        Leaves (steps, batch, ...), in the order of the dispatches.
    """
    # Importing grain takes a second, which data on the devices does not need.
    import grain

    # One item per dispatch, in the sampler's order: runs with data on the host give the
    # same bits as runs with data on the devices.
    source = grain.MapDataset.source(dispatches)
    batches = source.map(lambda dispatch: gather(train, rows(*dispatch)))
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
    return iter(batches.to_iter_dataset(options))


def gather(train: Arrays | Source, rows: np.ndarray) -> Arrays:
    """Stacks the examples with these numbers: leaves (*rows.shape, ...).

    Raises:
        BadRequest: an example cannot be read, or differs in shape from others.
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
            f"{numbers[forms.index(usual)]} has {usual}"
        )
    return {
        name: np.stack([example[name] for example in examples]).reshape(
            *rows.shape, *np.shape(first)
        )
        for name, first in examples[0].items()
    }


def read(source: Source, number: int) -> Mapping[str, np.ndarray]:
    """Reads a copy of one example of a source, which may use its memory again.

    Raises:
        BadRequest: it cannot be read, or is no dict of arrays.
        MayPass: it cannot be read now, but perhaps later.
    """
    try:
        example = source[number]
        is_dict = isinstance(example, Mapping)
        arrays = {k: np.array(x) for k, x in example.items()} if is_dict else {}
        if not arrays or any(x.dtype.kind in "OSU" for x in arrays.values()):
            raise BadRequest(
                f"training example {number} must be a dict of arrays, got "
                f"{checks.shown(example)}"
            )
        return arrays
    except (BadRequest, *STOPS):
        raise
    except BaseException as error:  # a user's source may raise anything
        refused = explain(f"training example {number}", error)
        if isinstance(error, OSError) and not isinstance(error, _LASTING):
            raise MayPass(str(refused)) from error
        raise refused from error
