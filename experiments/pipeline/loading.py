"""A task's data for a run: loaded, checked and split."""

from experiments.cli.errors import explained
from experiments.cli.factories import TASK
from experiments.pipeline import validation
from experiments.tasks.contract import check_data
from experiments.tasks.task import Data, Task

MOST_ON_DEVICE = 2**30  # bytes of training data, of which each device has a copy


def load(task: Task, name: str, share: float | None) -> Data:
    """Reads the data of a task.

    Args:
        task: the task.
        name: the name of the task, for errors.
        share: the share of training data that replaces the test data; None means none.

    Raises:
        ValueError: the data cannot be used; one line says why.
    """
    with explained(TASK.flag, name):
        data = task.load()
        check_data(data)
    return data if share is None else validation.split(data, share)


def is_read_on_host(data: Data) -> bool:
    """Whether batches are read on the host: the devices do not hold the data."""
    if not isinstance(data.train, dict):
        return True
    return sum(x.nbytes for x in data.train.values()) > MOST_ON_DEVICE
