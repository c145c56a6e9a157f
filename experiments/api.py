"""The Python interface: `train` executes a run, and `compare` a study.

Both can be imported from `experiments`. docs/from-python.md shows how to use them.
"""

import logging
import pickle
import secrets
import shlex
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
from experiments.command.factories import OWN
from experiments.command.flags import own_of, words_of
from experiments.command.overlapping import Overlapping
from experiments.command.words import as_words, flag_groups, without
from experiments.one_run import opened
from experiments.study import config as study_config
from experiments.study import page, study
from experiments.study.command_line import VariantWords, read_algorithms
from experiments.study.results import Report
from experiments.tasks.task import Task, check_task
from experiments.training import machine
from experiments.training.config import RunConfig
from experiments.training.objects import NO_OBJECTS, Objects
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
        page.write(self.found, Path(folder))
        return Path(folder) / "report.html"


Algorithm = str | RunConfig | Strategy | Callable[..., Strategy]
"""A name with flags, such as "bmuf --period 8", a config, a strategy or its factory."""


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
            algorithm is a name with flags, a strategy, a factory of strategies, or a
            RunConfig, of which all but the task is the algorithm's own.
        seeds: the number of runs of each algorithm, with seeds 0 to N - 1.
        tune: flags to tune for each algorithm on validation data, by name:
            {"lr": "0.0125:1.6:log:8"}.
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
    study_flags = dict(flags or {})
    task = None
    if "task" in study_flags:
        task, study_flags["task"] = _take_task(study_flags["task"])
    algorithms = _list_algorithms(algos, task)
    # No study is continued with other objects.
    has_objects = any(x.objects != NO_OBJECTS for x in algorithms)
    token = secrets.token_hex(4) if has_objects else ""
    text = algos
    if not isinstance(text, str):
        text = ", ".join(map(_write_algorithm, algorithms))
    tuned = [f"{name}={values}" for name, values in (tune or {}).items()]
    argv = as_words({"algos": text, "seeds": seeds, "tune": tuned, **study_flags})
    config = study_config.read(argv, algorithms, token)
    if config.list:
        raise BadRequest("--list makes no runs: use python -m experiments.compare")
    if config.is_parallel:
        for variant in algorithms:
            _check_importable(variant.objects)
    with study.opened(config) as (plan, maker):
        study.make_runs(config, plan, maker, _never)
        runs = study.ended(plan)
    if plan.failures:
        raise BadRequest(plan.failures[0][1].line)
    report = study.report(config, argv, runs)
    rows = [page.csv_row(report, row) for row in report.rows]
    return Study(rows, [*study.final_lines(runs)], config.folder, report)


def _take_task(task: Any) -> tuple[Any, str]:
    """Returns a task that is no name, or None; and its name for a config.

    Raises:
        BadRequest: it is neither a name, nor a Task or its factory.
    """
    if isinstance(task, str):
        return None, task
    _check_object(task, Task)
    imported_name = _find_import(task)
    return (None, imported_name) if imported_name else (task, OWN)


def _list_algorithms(
    algos: str | Sequence[Algorithm] | Mapping[str, Algorithm], task: Any
) -> list[VariantWords]:
    """Returns the algorithms that `compare` is called with, and their objects.

    Raises:
        BadRequest: one is neither a name, a config, a strategy nor a factory; or two
            have one label.
    """
    objects = Objects(task=task)
    if isinstance(algos, str):
        return [x._replace(objects=objects) for x in read_algorithms(algos)]
    pairs: list[tuple[str, Algorithm]] = []
    if isinstance(algos, Mapping):
        pairs += algos.items()
    else:
        pairs += [("", algorithm) for algorithm in algos]
    variants: dict[str, VariantWords] = {}
    for number, (label, algorithm) in enumerate(pairs, 1):
        variant = _make_variant(label, number, algorithm, objects)
        if variant.label in variants:
            raise BadRequest(
                f"compare has {variant.label!r} twice: give another label, as in "
                "{'other': …}"
            )
        variants[variant.label] = variant
    return [*variants.values()]


def _make_variant(
    label: str, number: int, algorithm: Algorithm, objects: Objects
) -> VariantWords:
    """Makes one algorithm of `compare`; its place and its name label it by default."""
    if isinstance(algorithm, str):
        named_variants = read_algorithms(algorithm)
        if len(named_variants) != 1:
            raise BadRequest(
                f"{algorithm!r} has several algorithms: give each as an item of its own"
            )
        [variant] = named_variants
        return variant._replace(label=label or variant.label, objects=objects)
    if isinstance(algorithm, RunConfig):
        if algorithm.task != DEFAULT.task:
            raise BadRequest(
                f"compare trains one task: name {algorithm.task!r} in flags, and leave "
                "it out of the RunConfig"
            )
        words = without(words_of(algorithm), ("algo", "task"))
        own_words = tuple(word for group in flag_groups(words) for word in group)
        label = label or " ".join([algorithm.algo, *own_words])
        return VariantWords(label, algorithm.algo, own_words, objects=objects)
    _check_object(algorithm, Strategy)
    name = getattr(algorithm, "__name__", "")
    label = label or (name if name.isidentifier() else f"strategy {number}")
    imported_name = _find_import(algorithm)
    if imported_name:
        return VariantWords(label, imported_name, objects=objects)
    return VariantWords(label, OWN, objects=replace(objects, strategy=algorithm))


def _check_object(x: Any, kind: type) -> None:
    """Raises a BadRequest unless this is an object of a kind, or its factory."""
    if not (isinstance(x, kind) or callable(x)):
        raise BadRequest(f"compare takes names, objects and factories, got {shown(x)}")


def _find_import(x: Any) -> str:
    """Returns the name by which any process can import a factory; "" if none can."""
    if not callable(x):
        return ""
    module = getattr(x, "__module__", "")
    name = getattr(x, "__name__", "")
    is_there = getattr(sys.modules.get(module), name, None) is x
    return f"{module}:{name}" if is_there and module != "__main__" else ""


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


def _write_algorithm(variant: VariantWords) -> str:
    """Returns an algorithm as a word of --algos."""
    call = shlex.join([variant.algo, *variant.words])
    if variant.label in (variant.algo, " ".join([variant.algo, *variant.words])):
        return call
    return f"{shlex.quote(variant.label)}={call}"


def _never() -> int:
    """Never asks for a stop: Ctrl-C raises KeyboardInterrupt, as in any Python call."""
    return 0
