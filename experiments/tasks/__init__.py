"""Tasks: a model, its data and what is measured; one file each."""

from collections.abc import Callable
from pathlib import Path

from experiments.tasks.digits import digits
from experiments.tasks.task import Task

TASKS: dict[str, Callable[[Path | None], Task]] = {"digits": digits}
