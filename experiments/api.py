"""The Python interface: `train` makes one run, and `compare` makes a study.

Both can be imported from `experiments`. docs/from-python.md shows how to use them.
"""

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.cli.errors import BadRequest, Unwritten, check_working_folder
from experiments.cli.factories import OWN
from experiments.cli.flags import own_of
from experiments.cli.terminal import Quiet
from experiments.cli.words import as_words
from experiments.launch.run_job import finish, in_folder
from experiments.study import config as study_config
from experiments.study import study
from experiments.study.analysis.results import Report
from experiments.study.report import tables, write
from experiments.study.running.make import make_runs
from experiments.tasks.contract import check_task
from experiments.tasks.task import Task
from experiments.training.config import RunConfig
from experiments.training.process_group import on_host
from experiments.training.recording import tracking, train_and_record
from experiments.training.records import Line, Progress
from experiments.training.run import prepare
from experiments.training.trackers import Tracker
from syncalgos import Replica, Strategy
from syncalgos.strategy import check_strategy

DEFAULT = RunConfig()


class Trained(NamedTuple):
    """The result of `train`.

    Attributes:
        summary: the content of summary.json.
        metrics: the evaluations, one for each line of metrics.jsonl.
        center: the model to ship, as NumPy arrays.
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
    track: Sequence[Tracker] = (),
) -> Trained:
    """Trains one task with one algorithm, as `python -m experiments.run` does.

    Args:
        config: a field for each flag of the command; None leaves a field to the task.
            Without `out`, nothing is written. The algorithm's own flags go into
            `arguments`.
        task: a model with its data, used in place of the config's task.
        strategy: used in place of the config's algorithm. The learning rate in `config`
            is then the inner optimizer's.
        on_evaluation: called with each evaluation as soon as it is made.
        track: your own trackers, in addition to those that `config.track` names.

    Returns:
        The summary, the evaluations and the center. The same config gives the same
        `params_sha256` as the command on the same number of devices.

    Raises:
        BadRequest: the request cannot be met; one line says why.
        Unwritten: the run is done, but an output that was asked for could not be
            written: the exported model, a checkpoint, a file in `out` or a tracker's.
            `result` of the error is what `train` would have returned.
    """
    started = time.perf_counter()
    check_working_folder()
    others = config.processes > 1, config.coordinator
    if any(others) or config.distributed != "none":
        raise BadRequest("train uses only this process: start experiments.run instead")
    files = config.checkpoint_every, config.resume, config.resume_center, config.export
    if config.out is None and any((*files, config.track)):
        raise BadRequest("checkpoints, export and track need a folder: set out=...")
    try:
        if task is not None:
            check_task(task)
            config = replace(config, task=OWN, task_arguments={})
        if strategy is not None:
            check_strategy("train", strategy)
            config = replace(config, algo=OWN, arguments={})
    except ValueError as error:
        raise BadRequest(str(error)) from error
    # Defaults are filled in as the command does, so that both can resume a run.
    algo, own_task = own_of(config.algo, config.task, config.preset)
    config = replace(
        config,
        arguments=algo.defaults | {**config.arguments},
        task_arguments=own_task.defaults | {**config.task_arguments},
    )
    run = prepare(config, task=task, strategy=strategy)
    out, held = run.config.out, nullcontext((run, Progress(), lambda *_: None, _never))
    if out is not None:
        # A program that embeds Python may have no argv.
        held = in_folder(run, out, getattr(sys, "argv", []), started)
    with held as (run, progress, save, wait):
        tracked = tracking(run, progress, out, track)

        def tell(line: Line) -> None:
            tracked.log(line)
            if on_evaluation is not None:
                on_evaluation(line)

        given = Quiet(), _never, save, progress, tell
        outcome, summary = train_and_record(run, out, *given)
        wait()
        missing = finish(run, outcome, summary, out, started) if out else []
        tracked.finish(summary)
    center = jax.tree.map(on_host, run.trainer.center(outcome.state))
    trained = Trained(summary, outcome.progress.lines, center)
    if missing := [*missing, *tracked.failed]:
        raise Unwritten("; ".join(missing), trained)
    return trained


class Study(NamedTuple):
    """The result of `compare`.

    Attributes:
        rows: the rows of table.csv, one for each variant.
        runs: the final results of every run, including runs that tune.
        folder: the folder with the runs' files.
        found: the content of the report.
    """

    rows: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    folder: Path
    found: Report

    def frame(self) -> Any:
        """Returns the rows as a pandas DataFrame, which needs pandas."""
        import pandas

        return pandas.DataFrame(self.rows)

    def report(self, folder: str | Path) -> Path:
        """Writes report.html, table.md, table.csv and figures; returns the page."""
        write.write(self.found, Path(folder))
        return Path(folder) / "report.html"


def compare(
    algos: str | Mapping[str, str],
    *,
    seeds: int = 5,
    tune: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Study:
    """Compares algorithms, as `python -m experiments.compare` does.

    Runs that already are in the study's folder are not repeated.

    Args:
        algos: the value of `--algos`, such as "sync_sgd, bmuf --nesterov"; or a dict
            with a label for each algorithm, {"mine": "my_module:factory --period 8"}.
        seeds: the number of runs of each algorithm, with seeds 0 to N - 1.
        tune: flags to tune for each algorithm on validation data, by name:
            {"lr": "0.0125:1.6:log:8"}.
        flags: all other flags of the study and of its runs, by name:
            {"task": "mnist1d", "steps": 400, "baseline": "sync_sgd", "out": "study"}.

    Returns:
        The table, the runs and the report; `Study.report` writes the report.

    Raises:
        BadRequest: the request cannot be met; one line says why.
    """
    check_working_folder()
    argv = _argv(algos, seeds, tune or {}, flags or {})
    config = study_config.read(argv)
    if config.list:
        raise BadRequest("--list makes no runs: use python -m experiments.compare")
    with study.opened(config) as (plan, loader):
        make_runs(config, plan, loader, _never)
        runs = study.ended(plan)
    if plan.failures:
        raise BadRequest(plan.failures[0].line)
    found = study.report(config, argv, runs)
    rows = [tables.csv_row(found, row) for row in found.rows]
    return Study(rows, [*study.final_lines(runs)], config.folder, found)


def _argv(
    algos: str | Mapping[str, str],
    seeds: int,
    tune: Mapping[str, str],
    flags: Mapping[str, Any],
) -> list[str]:
    """Returns the command line of a comparison."""
    if not isinstance(algos, str):
        labelled = (f"{shlex.quote(label)}={x}" for label, x in algos.items())
        algos = ", ".join(labelled)
    tuned = [f"{name}={values}" for name, values in tune.items()]
    argv = as_words({"algos": algos, "seeds": seeds, "tune": tuned})
    return [*argv, *as_words(flags)]


def _never() -> int:
    """Never asks for a stop: Ctrl-C raises KeyboardInterrupt, as in any Python call."""
    return 0
