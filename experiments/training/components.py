"""Makes a request's task and algorithm, by the user's flags and what the run has."""

from typing import Any

import optax

from experiments.cli import factories, flags
from experiments.cli.errors import explained
from experiments.cli.factories import ALGORITHM, TASK, Kind
from experiments.cli.flags import Request
from experiments.tasks.contract import check_task
from experiments.tasks.task import Task
from experiments.training.optimizers import Schedule
from experiments.training.process_group import Team
from syncalgos import WORKERS, Strategy, checks


def make_task(request: Request) -> Task:
    """Calls the task's factory with its flags and what the harness passes.

    Raises:
        BadRequest: what a task cannot be; a ValueError where it is one of ours.
    """
    s = request.settings
    offered = {
        "data_dir": s.data_dir,
        "seed": s.seed,
        "workers": s.workers,
        "axis": WORKERS,
    }
    with explained(TASK.flag, s.task):
        task = _call(TASK, s.task, request.task_arguments, offered)
        check_task(task)
    return task


def make_strategy(
    request: Request,
    arguments: dict[str, Any],
    learning_rate: Schedule,
    optimizer: optax.GradientTransformation,
    team: Team,
    task: Task,
) -> Strategy:
    """Calls the algorithm's factory with its flags and what the harness passes.

    Raises:
        BadRequest: what a strategy cannot be; a ValueError where it is one of ours.
    """
    s = request.settings
    offered = {
        "seed": s.seed,
        "learning_rate": learning_rate,
        "optimizer": optimizer,
        "axis": WORKERS,
        "hosts": team.hosts,
        "stacked": task.stacked,
    }
    if "cut" in arguments and arguments["cut"] is None and task.stacked:
        arguments = {**arguments, "cut": "bytes"}  # a few leaves hold most of the model
    with explained(ALGORITHM.flag, s.algo):
        strategy = _call(ALGORITHM, s.algo, arguments, offered)
        if not isinstance(strategy, Strategy):
            raise ValueError(
                "the factory must return a syncalgos.Strategy, got "
                f"{checks.shown(strategy)}"
            )
    return strategy


def _call(
    kind: Kind, name: str, arguments: dict[str, Any], offered: dict[str, Any]
) -> Any:
    factory = flags.find(kind, name)
    passed = factories.passed_arguments(kind, factory, offered)
    return factory(**arguments, **passed)


def takes(request: Request, argument: str) -> bool:
    """Whether the algorithm or the task has this parameter, which the run passes.

    Of the seed: it draws while it trains.
    """
    s = request.settings
    return any(
        factories.passed_arguments(kind, flags.find(kind, name), {argument: 0})
        for kind, name in ((ALGORITHM, s.algo), (TASK, s.task))
    )
