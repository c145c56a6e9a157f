"""Makes the runs of a study that are missing."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from experiments.cli import terminal
from experiments.cli.errors import explained
from experiments.cli.factories import TASK
from experiments.cli.flags import PROGRAM
from experiments.study import network, tuning
from experiments.study.analysis.formatting import duration
from experiments.study.grid import Loader, RunSet
from experiments.study.statistics import ACCURACY, measure
from experiments.tasks.contract import check_apply, check_model
from experiments.training import prepared, records
from experiments.training.defaults import takes
from experiments.training.prepared import PreparedRun
from experiments.training.records import Progress as TrainingProgress


class _Stop(Exception):
    """The user asked to stop."""


class StudyProgress:
    """Shows the runs done and the time left; the `terminal.Report` of each run.

    Args:
        total: number of runs.
        done: number of those that exist already.
        bar: progress bar, disabled where there is no terminal.
    """

    def __init__(self, total: int, done: int, bar: Progress):
        self.total, self.done, self.made = total, done, 0
        self.started = time.perf_counter()
        self.name, self.steps, self.bar = "", 1, bar
        self.task = bar.add_task("", total=total, completed=done, left="")

    def begin(self, name: str, steps: int) -> None:
        """Starts a run of so many local steps."""
        self.name, self.steps = name, steps
        self.step(0)

    def step(self, done: int) -> None:
        """Shows that so many local steps of the run are done."""
        at, number = done / self.steps, min(self.done + 1, self.total)
        self.bar.update(
            self.task,
            completed=self.done + at,
            description=f"run {number}/{self.total} {self.name}",
            left=self.left(at),
        )

    def line(self, text: str) -> None:
        """Ignores an evaluation: a study shows the end of each run alone."""

    def end(self, text: str) -> None:
        """Ends the run, and shows its results."""
        self.done, self.made = self.done + 1, self.made + 1
        said = f"run {self.done}/{self.total} {self.name}: {text}  {self.left()}"
        self.say(said.rstrip())

    def say(self, text: str) -> None:
        """Shows a line."""
        terminal.above(self.bar, text)

    def left(self, at: float = 0.0) -> str:
        """Returns the time left in words, with a part of the present run done."""
        made, missing = self.made + at, self.total - self.done - at
        # The first steps take much longer: they are compiled.
        if made < 0.2 or missing <= 0:
            return ""
        seconds = (time.perf_counter() - self.started) / made * missing
        return f"about {duration(seconds, digits=2)} left"


@contextmanager
def progress(total: int, done: int) -> Iterator[StudyProgress]:
    """Shows a bar where stderr is a terminal, a line for each run elsewhere."""
    columns = ("{task.description}", BarColumn(), TimeElapsedColumn())
    columns += ("{task.fields[left]}",)
    console, is_hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:
        yield StudyProgress(total, done, bar)


def check_measure(
    planned: Sequence[RunSet], loader: Loader, key: str | None, target: float | None
) -> None:
    """Raises a ValueError for a measure that no run will have, or its target.

    Args:
        planned: runs to report, one of which is tried out on shapes.
        loader: prepares it.
        key: key of the measure; None takes the accuracy if there is one.
        target: value to reach; None for the default.
    """
    if key is None and target is None:
        return
    first = planned[0]
    made = loader.components(first.argv, first.seeds[0])
    with explained(TASK.flag, made.config.task):
        params, buffers = check_model(made.task, first.seeds[0])
        values = check_apply(made.task, params, buffers, made.data.test)
    names = {f"test_{name}" for name in (*values, *made.task.figures)}
    by = measure(key, [dict.fromkeys(names, 1.0) | {"diverged": False}])
    if target is not None and by is ACCURACY and target > 1:
        raise ValueError(f"--target {target:g}: an accuracy is at most 1: say 0.95")


def make_runs(
    planned: Sequence[RunSet],
    loader: Loader,
    measure_key: str | None,
    asked_to_stop: Callable[[], int],
) -> list[RunSet] | None:
    """Makes all missing runs; returns those to report, with the values chosen for them.

    Args:
        planned: runs to report, with their trials.
        loader: prepares them.
        measure_key: measure to tune by; None takes the accuracy if there is one.
        asked_to_stop: called after each dispatch. Then the present run is discarded,
            those done are kept, and None is returned.

    Raises:
        ValueError: the runs lack this measure.
        OSError: a file cannot be written; runs that are done stay.
    """
    trials = [trial for made in planned for trial in made.trials]
    total = sum(len(each.seeds) for each in (*trials, *planned))
    missing = sum(len(trial.missing()) for trial in trials)
    for made in planned:
        # Before all trials are done, nobody knows which values the final runs have.
        waits = any(trial.missing() for trial in made.trials)
        final = made if waits else tuning.chosen(made, measure_key)
        missing += len(made.seeds) if waits else len(final.missing())
    with progress(total, total - missing) as bar:
        there = f"{total - missing} of {total} runs are there already"
        bar.say(there if missing < total else f"{total} runs to make")
        try:
            for trial in trials:
                _make(trial, loader, bar, asked_to_stop)
            found = [tuning.chosen(made, measure_key) for made in planned]
            for made in found:
                _make(made, loader, bar, asked_to_stop)
        except _Stop:
            bar.say(f"stopped after {bar.done} of {total} runs")
            return None
    return found


def _make(
    runs: RunSet,
    loader: Loader,
    bar: StudyProgress,
    asked_to_stop: Callable[[], int],
) -> None:
    """Makes the missing runs of a set, with one compiled program for all seeds."""
    trial = runs.trial if runs.share is not None else ""
    name = " ".join(x for x in (runs.variant.label, runs.point, trial) if x)
    job: PreparedRun | None = None
    for number, seed in enumerate(runs.missing()):
        # Before the first run nothing would be lost: the signal ends the process.
        if bar.made and asked_to_stop():
            raise _Stop
        # Seeds in turn cost one compilation, as seeds in a stack would: on CPU the
        # lanes fill the cores already. A run that draws from its seed while it trains
        # has the seed in its program, which is compiled for each.
        if job is None or takes(job.config, "seed"):
            job = prepared.initialized(loader.components(runs.argv, seed))
        else:
            job = prepared.reseeded(job, seed)
        if job.rounds.untrained and not number:
            bar.say(
                f"{name}: the figures will be of the model as it was at the start: "
                f"{job.rounds.untrained}"
            )
        bar.begin(f"{name}, seed {seed}", job.config.steps)
        bar.end(_run(job, runs, seed, bar, asked_to_stop))
    if job is not None:
        # Else the programs of all run sets stay in memory: 30 MB each.
        jax.clear_caches()


def _run(
    job: PreparedRun,
    runs: RunSet,
    seed: int,
    bar: StudyProgress,
    asked_to_stop: Callable[[], int],
) -> str:
    """Makes one run, and returns its results in words."""
    started = time.perf_counter()
    # A folder gets its name once all its files exist: no run is half made.
    unfinished = runs.folder / f".seed-{seed}"
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [*PROGRAM.split(), *runs.argv, "--seed", str(seed)]
    prepared.record_config(job, command, unfinished, [])
    outcome, summary = prepared.train_and_record(job, unfinished, bar, asked_to_stop)
    if outcome.stopped:
        raise _Stop
    summary["total_seconds"] = round(time.perf_counter() - started, 3)
    summary["sends"] = _sends(job, outcome.progress)
    records.finish(unfinished, summary, outcome.progress.lines)
    unfinished.replace(runs.run(seed))
    return _results(summary)


def _sends(job: PreparedRun, done: TrainingProgress) -> dict[str, Any] | None:
    """Returns the sends of each step and their delay; None if not counted."""
    if (sent := job.rounds.sent(done)) is None:
        return None
    c = job.config
    # An average of the optimizer's state, and shared tables, are used at once.
    waits = c.opt_state_at_sync == "average" or job.task.kept == "shared"
    delay = 0 if waits else network.delay_of(c.algo, c.arguments)
    return {**network.to_json(network.sends(sent)), "delay": delay}


def _results(summary: dict[str, Any]) -> str:
    """Returns the results of a run in words."""
    if summary["diverged"]:
        return f"diverged at step {summary['diverged_at']}"
    shown = {k: x for k, x in terminal.measured(summary).items() if x is not None}
    figures = [f"{name} {terminal.figure(x)}" for name, x in shown.items()]
    return ", ".join([*figures, f"{summary['total_seconds']:.1f} s"])
