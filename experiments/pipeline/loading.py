"""A task's data for a run: loaded, split, and dealt out to the workers."""

from argparse import Namespace

import numpy as np

from experiments.cli.errors import explained
from experiments.cli.factories import TASK
from experiments.pipeline import partition, validation
from experiments.tasks.contract import check_data
from experiments.tasks.task import Data, Task

MOST_ON_DEVICE = 2**30  # bytes of training data, of which each device has a copy


def load(s: Namespace, task: Task) -> Data:
    """Reads the data; with --validation, a part of the training data is the test.

    Raises:
        ValueError: data that cannot be used, in one line.
    """
    with explained(TASK.flag, s.task):
        data = task.load()
        check_data(data)
    return data if s.validation is None else validation.split(data, s.validation)


def check(s: Namespace, data: Data, is_batch_given: bool) -> None:
    """Raises a ValueError unless the data goes with the run's settings."""
    least = s.workers * s.accumulate
    if not is_batch_given and least > data.examples:
        microbatches = f" × {s.accumulate} microbatches" if s.accumulate > 1 else ""
        raise ValueError(
            f"{s.workers} workers{microbatches} need a batch of at least {least}, but "
            f"the training data of {s.task} holds {data.examples} examples"
        )
    if s.batch_size > data.examples:
        raise ValueError(
            f"global batch of {s.batch_size} is larger than the training data of "
            f"{s.task} ({data.examples} examples)"
        )
    if s.feed == "device" and not isinstance(data.train, dict):
        raise ValueError(f"--feed device: the data of {s.task} is made on the host")


def default_feed(data: Data) -> str:
    """The device, if the data fits there: batches are then gathered in the loop."""
    if not isinstance(data.train, dict):
        return "host"
    held = sum(x.nbytes for x in data.train.values())
    return "device" if held <= MOST_ON_DEVICE else "host"


def shards(s: Namespace, data: Data) -> list[np.ndarray] | None:
    """Which training examples are each worker's own; None: all are everyone's.

    Raises:
        ValueError: a --partition that the data cannot have, in one line.
    """
    return partition.shards(s.partition, data.groups, data.examples, s.workers, s.seed)
