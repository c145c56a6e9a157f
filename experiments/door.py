"""The harness from Python: one run, or a comparison, by a call.

from experiments import RunConfig, train
run = train(RunConfig(workers=4, steps=200), strategy=syncalgos.bmuf(16))
run.summary["test_accuracy"], run.center.params
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from experiments.cli.errors import BadRequest
from experiments.cli.factories import OWN
from experiments.launch.run_job import finish, in_folder
from experiments.tasks.contract import check_task
from experiments.tasks.task import Task
from experiments.training.config import RunConfig
from experiments.training.process_group import on_host
from experiments.training.recording import train_and_record
from experiments.training.records import Line
from experiments.training.run import prepare
from syncalgos import Replica, Strategy
from syncalgos.strategy import check_strategy

DEFAULT = RunConfig()


class Trained(NamedTuple):
    """The result of `train`.

    Attributes:
        summary: as summary.json has it.
        metrics: the evaluations, as metrics.jsonl has them.
        center: the model to ship, NumPy arrays.
    """

    summary: dict[str, Any]
    metrics: list[Line]
    center: Replica


def train(
    config: RunConfig = DEFAULT,
    *,
    task: Task | None = None,
    strategy: Strategy | None = None,
    on_evaluation: Callable[[Line], None] | None = None,
) -> Trained:
    """Trains one task by one algorithm, as `python -m experiments.run` does.

    Args:
        config: what the command's flags say, by field; None leaves a field to the task.
            Without `out` nothing is written. An algorithm's own flags are `arguments`.
        task: in place of the config's, a model with its data.
        strategy: in place of the config's algorithm. Its learning rate in `config` is
            the inner optimizer's.
        on_evaluation: is called with each evaluation as it is made.

    Returns:
        The summary, the evaluations and the center. The same config has the same
        `params_sha256` as the command, on as many devices.

    Raises:
        BadRequest: what cannot be done, in one line.
    """
    started = time.perf_counter()
    if config.processes > 1 or config.coordinator or config.scheduler:
        raise BadRequest("train makes a run in this process alone: take the command")
    if config.out is None and (config.checkpoint_every or config.resume):
        raise BadRequest("checkpoints need a folder: say out")
    try:
        if task is not None:
            check_task(task)
            config = replace(config, task=OWN, task_arguments={})
        if strategy is not None:
            check_strategy("train", strategy)
            config = replace(config, algo=OWN, arguments={})
    except ValueError as error:
        raise BadRequest(str(error)) from error
    run = prepare(config, task=task, strategy=strategy)
    if (out := run.config.out) is None:
        ended = train_and_record(run, None, _Quiet(), _never, None, None, on_evaluation)
    else:
        with in_folder(run, out, sys.argv, started) as (run, progress, save, wait):
            given = _Quiet(), _never, save, progress, on_evaluation
            ended = train_and_record(run, out, *given)
            wait()
            finish(run, *ended, out, started)
    outcome, summary = ended
    center = jax.tree.map(on_host, run.trainer.center(outcome.state))
    return Trained(summary, outcome.progress.lines, center)


class _Quiet:
    """A report that shows nothing."""

    def step(self, done: int, loss: float) -> None:
        pass

    def line(self, text: str) -> None:
        pass


def _never() -> int:
    """Asks for no stop: Ctrl-C interrupts a call as any other."""
    return 0
