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


def default_feed(data: Data) -> str:
    """Returns "device" if the data fits there, else "host"."""
    if not isinstance(data.train, dict):
        return "host"
    held = sum(x.nbytes for x in data.train.values())
    return "device" if held <= MOST_ON_DEVICE else "host"
