"""The Python interface: `train` executes a run, and `compare` a study.

Both can be imported from `experiments`. docs/from-python.md shows how to use them.
"""

import logging
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.command import errors, terminal
from experiments.command.errors import BadRequest, Unwritten
from experiments.command.factories import YOUR_OWN
from experiments.command.flags import describe_factories
from experiments.command.overlapping import Overlapping
from experiments.one_run import open_run
from experiments.study import analysis, page, study
from experiments.study.from_python import Algorithms, Values, make_study
from experiments.study.results import Report
from experiments.tasks.task import Task, check_task
from experiments.training import machine
from experiments.training.config import RunConfig
from experiments.training.objects import Objects
from experiments.training.prepare import prepare
from experiments.training.process_group import on_host
from experiments.training.summary import summarize
from experiments.training.trackers import Tracker
from syncalgos import Replica, Strategy
from syncalgos.checks import shown
from syncalgos.writing import check_strategy

DEFAULT = RunConfig()


@Overlapping
@contextmanager
def _restoring_process() -> Iterator[None]:
    """Leaves warnings' filters, jax's settings and log handlers as they were."""
    handlers = [*logging.root.handlers]  # absl, which grain imports, adds one
    with warnings.catch_warnings(), machine.cache_as_before():
        try:
            yield
        finally:
            logging.root.handlers[:] = handlers


class Trained(NamedTuple):
    """The result of `train`.

    Attributes:
        summary: the content of summary.json.
        metrics: the evaluations, one for each line of metrics.jsonl.
        center: the model to ship, as NumPy arrays.
    """

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    center: Replica


@_restoring_process
def train(
    config: RunConfig = DEFAULT,
    *,
    task: Task | None = None,
    strategy: Strategy | None = None,
    on_evaluation: Callable[[dict[str, Any]], None] | None = None,
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
    errors.check_working_folder()
    if config.processes > 1 or config.coordinator or config.distributed != "none":
        raise BadRequest("train uses only this process: start experiments.run instead")
    files = config.checkpoint_every, config.resume, config.resume_center, config.export
    if config.out is None and any((*files, config.track)):
        raise BadRequest("checkpoints, export and track need a folder: set out=...")
    with errors.refusing():
        if task is not None:
            check_task(task)
            config = replace(config, task=YOUR_OWN, task_arguments={})
        if strategy is not None:
            check_strategy("train", strategy)
            config = replace(config, algo=YOUR_OWN, arguments={})
    # Defaults are filled in as the command does, so that both can resume a run.
    factories = describe_factories(config.algo, config.task, config.preset)
    algorithm_factory, task_factory = factories
    config = replace(
        config,
        arguments=algorithm_factory.defaults | {**config.arguments},
        task_arguments=task_factory.defaults | {**config.task_arguments},
    )
    run = prepare(config, task=task, strategy=strategy)
    # A program that embeds Python may have no argv.
    with open_run(run, config.out, getattr(sys, "argv", []), started) as folder:
        run = folder.run  # frees the initial state
        tracked = folder.track(track)
        outcome = folder.train(terminal.ProgressDisplay(), _never, on_evaluation)
        summary, missing = folder.finish(outcome, summarize(run, outcome))
        tracked.finish(summary.to_json())
    center = jax.tree.map(on_host, outcome.center)
    result = Trained(summary.to_json(), folder.lines, center)
    missing = [*missing, *tracked.failed]
    if missing:
        raise Unwritten("; ".join(missing), result)
    return result


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
        page.write_report(self.found, Path(folder))
        return Path(folder) / "report.html"


@_restoring_process
def compare(
    algos: Algorithms,
    *,
    seeds: int = 5,
    tune: Mapping[str, Values] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Study:
    """Compares algorithms, as `python -m experiments.compare` does.

    Runs that already are in the study's folder are not repeated.

    Args:
        algos: the value of `--algos`, such as "sync_sgd, bmuf --nesterov"; or a list of
            algorithms; or a dict with a label for each, {"mine": syncalgos.bmuf(8)}. An
            algorithm is a name with flags, a strategy, a factory of strategies, or a
            RunConfig, of which all but the task is the algorithm's own.
        seeds: the number of runs of each algorithm, with seeds 0 to N - 1.
        tune: flags to tune for each algorithm on validation data, by name; the values
            as for `--tune`, {"lr": "0.0125:1.6:log:8"}, or a list of numbers.
        flags: all other flags of the study and of its runs, by name:
            {"task": "mnist1d", "steps": 400, "baseline": "sync_sgd", "out": "study"}.
            The task may also be a Task or its factory.

    A study of objects, or of functions of a script, is made anew in each call. Jobs
    take those that pickle by what other processes can import.

    Returns:
        The table, the runs and the report; `Study.report` writes the report.

    Raises:
        BadRequest: the request cannot be met; one line says why.
    """
    errors.check_working_folder()
    config = make_study(algos, seeds=seeds, tune=tune or {}, flags=flags or {})
    if config.list:
        raise BadRequest("--list makes no runs: use python -m experiments.compare")
    if config.is_parallel:
        for variant in config.variants:
            _check_importable(variant.objects)
    with study.open_study(config) as (plan, maker):
        study.make_runs(config, plan, maker, _never)
        runs = study.read_runs(plan)
    if plan.failures:
        raise BadRequest(plan.failures[0][1].line)
    call = _describe_call(algos, seeds, tune or {}, flags or {})
    report = analysis.make_report(config, runs, call)
    rows = [page.csv_row(report, row) for row in report.rows]
    return Study(rows, [*study.final_lines(runs)], config.folder, report)


def _describe_call(
    algos: Algorithms, seeds: int, tune: Mapping[str, Any], flags: Mapping[str, Any]
) -> str:
    """Returns a call of `compare` as a report shows it, without what changes no run."""
    arguments = [_describe(algos), f"seeds={seeds}"]
    if tune:
        arguments.append(f"tune={_describe(tune)}")
    decisive_flags = {**flags}
    for name in ("jobs", "scheduler"):
        decisive_flags.pop(name, None)
    if decisive_flags:
        arguments.append(f"flags={_describe(decisive_flags)}")
    return f"experiments.compare({', '.join(arguments)})"


def _describe(value: Any) -> str:
    """Returns a value of a call as Python writes it; an object by its type or name."""
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Mapping):
        items = [f"{name!r}: {_describe(x)}" for name, x in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple) and not isinstance(value, Task | Strategy):
        return f"[{', '.join(map(_describe, value))}]"
    if isinstance(value, RunConfig):
        return f"RunConfig({value.algo!r}, …)"
    is_plain = isinstance(value, str | int | float | None)
    return repr(value) if is_plain else shown(value)


def _check_importable(objects: Objects) -> None:
    """Raises a BadRequest unless other processes can import what makes the objects."""
    for x in (objects.strategy, objects.task):
        if x is None:
            continue
        try:
            is_importable = b"__main__" not in pickle.dumps(x)
        except (pickle.PicklingError, AttributeError, TypeError):
            is_importable = False
        if not is_importable:
            raise BadRequest(
                f"jobs import by name what they run, which {type(x).__name__} "
                f"{shown(x)} does not allow: use 'module:function', or one job"
            )


def _never() -> int:
    """Never asks for a stop: Ctrl-C raises KeyboardInterrupt, as in any Python call."""
    return 0
