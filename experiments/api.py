"""The Python interface: `train` executes a run, and `compare` a study.

Both can be imported from `experiments`. docs/from-python.md shows how to use them.
"""

import logging
import secrets
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax

from experiments.command import errors, terminal
from experiments.command.errors import BadRequest, Unwritten
from experiments.command.factories import OWN
from experiments.command.flags import own_of
from experiments.command.overlapping import Overlapping
from experiments.command.words import as_words
from experiments.one_run import opened
from experiments.study import config as study_config
from experiments.study import page, study
from experiments.study.results import Report
from experiments.tasks.task import Task, check_task
from experiments.training import machine
from experiments.training.config import RunConfig
from experiments.training.prepare import prepare
from experiments.training.process_group import on_host
from experiments.training.progress import Line
from experiments.training.summary import summarize
from experiments.training.trackers import Tracker
from syncalgos import Replica, Strategy
from syncalgos.checks import shown
from syncalgos.writing import check_strategy

DEFAULT = RunConfig()


@Overlapping
@contextmanager
def _as_before() -> Iterator[None]:
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
    metrics: list[Line]
    center: Replica


@_as_before
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
    errors.check_working_folder()
    if config.processes > 1 or config.coordinator or config.distributed != "none":
        raise BadRequest("train uses only this process: start experiments.run instead")
    files = config.checkpoint_every, config.resume, config.resume_center, config.export
    if config.out is None and any((*files, config.track)):
        raise BadRequest("checkpoints, export and track need a folder: set out=...")
    with errors.refusing():
        if task is not None:
            check_task(task)
            config = replace(config, task=OWN, task_arguments={})
        if strategy is not None:
            check_strategy("train", strategy)
            config = replace(config, algo=OWN, arguments={})
    # Defaults are filled in as the command does, so that both can resume a run.
    algo, own_task = own_of(config.algo, config.task, config.preset)
    own = algo.defaults | {**config.arguments}
    of_task = own_task.defaults | {**config.task_arguments}
    config = replace(config, arguments=own, task_arguments=of_task)
    run = prepare(config, task=task, strategy=strategy)
    # A program that embeds Python may have no argv.
    with opened(run, config.out, getattr(sys, "argv", []), started) as folder:
        run = folder.run  # frees the initial state
        tracked = folder.track(track)
        outcome = folder.train(terminal.Report(), _never, on_evaluation)
        summary, missing = folder.finish(outcome, summarize(run, outcome))
        tracked.finish(summary.to_json())
    center = jax.tree.map(on_host, outcome.center)
    result = Trained(summary.to_json(), outcome.progress.lines, center)
    if missing := [*missing, *tracked.failed]:
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
        page.write(self.found, Path(folder))
        return Path(folder) / "report.html"


Algorithm = str | Strategy | Callable[..., Strategy]
"""A name with flags, such as "bmuf --period 8", a strategy, or its factory."""


@_as_before
def compare(
    algos: str | Sequence[Algorithm] | Mapping[str, Algorithm],
    *,
    seeds: int = 5,
    tune: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Study:
    """Compares algorithms, as `python -m experiments.compare` does.

    Runs that already are in the study's folder are not repeated.

    Args:
        algos: the value of `--algos`, such as "sync_sgd, bmuf --nesterov"; or a list of
            algorithms; or a dict with a label for each, {"mine": syncalgos.bmuf(8)}. An
            algorithm is a name with flags, a strategy or a factory of strategies.
        seeds: the number of runs of each algorithm, with seeds 0 to N - 1.
        tune: flags to tune for each algorithm on validation data, by name:
            {"lr": "0.0125:1.6:log:8"}.
        flags: all other flags of the study and of its runs, by name:
            {"task": "mnist1d", "steps": 400, "baseline": "sync_sgd", "out": "study"}.
            The task may also be a Task or its factory.

    Objects, and functions of a script, have no name that another process could import:
    such a study is made anew in each call, and not by jobs.

    Returns:
        The table, the runs and the report; `Study.report` writes the report.

    Raises:
        BadRequest: the request cannot be met; one line says why.
    """
    errors.check_working_folder()
    # A name of its own for each call: no study is continued with other objects.
    given = ModuleType(f"python_{secrets.token_hex(4)}")
    given.__file__ = None
    argv = _argv(algos, seeds, tune or {}, flags or {}, given)
    sys.modules[given.__name__] = given
    try:
        config = study_config.read(argv)
        if config.list:
            raise BadRequest("--list makes no runs: use python -m experiments.compare")
        if config.is_parallel and given.__name__ in " ".join(config.factories):
            raise BadRequest("jobs import by name: use 'module:function', no objects")
        with study.opened(config) as (plan, maker):
            study.make_runs(config, plan, maker, _never)
            runs = study.ended(plan)
        if plan.failures:
            raise BadRequest(plan.failures[0][1].line)
        found = study.report(config, argv, runs)
    finally:
        del sys.modules[given.__name__]
    rows = [page.csv_row(found, row) for row in found.rows]
    return Study(rows, [*study.final_lines(runs)], config.folder, found)


def _argv(
    algos: str | Sequence[Algorithm] | Mapping[str, Algorithm],
    seeds: int,
    tune: Mapping[str, str],
    flags: Mapping[str, Any],
    given: ModuleType,
) -> list[str]:
    """Returns the command line of a comparison; puts its objects into a module."""
    if not isinstance(algos, str):
        pairs = [*algos.items()] if isinstance(algos, Mapping) else []
        for number, x in enumerate(() if pairs else algos, 1):
            name = getattr(x, "__name__", "")
            label = name if name.isidentifier() else f"strategy {number}"
            pairs.append(("" if isinstance(x, str) else label, x))
        words = []
        for label, algorithm in pairs:
            name = _name(algorithm, given)
            words.append(f"{shlex.quote(label)}={name}" if label else name)
        algos = ", ".join(words)
    tuned = [f"{name}={values}" for name, values in tune.items()]
    argv = as_words({"algos": algos, "seeds": seeds, "tune": tuned})
    task = {"task": _name(flags["task"], given)} if "task" in flags else {}
    return [*argv, *as_words({**flags, **task})]


def _name(x: Any, given: ModuleType) -> str:
    """Returns the name of an algorithm or a task; puts an object into the module."""
    if isinstance(x, str):
        return x
    if callable(x):
        module, name = getattr(x, "__module__", ""), getattr(x, "__name__", "")
        if module != "__main__" and getattr(sys.modules.get(module), name, None) is x:
            return f"{module}:{name}"
    elif not isinstance(x, Strategy | Task):
        raise BadRequest(f"compare takes names, objects and factories, got {shown(x)}")
    name = f"given{len(vars(given))}"
    setattr(given, name, x if callable(x) else lambda: x)
    return f"{given.__name__}:{name}"


def _never() -> int:
    """Never asks for a stop: Ctrl-C raises KeyboardInterrupt, as in any Python call."""
    return 0
