"""Makes the runs of a study that are missing."""

import shutil
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax

from experiments.cli import flags, terminal
from experiments.cli.errors import explained
from experiments.cli.factories import TASK
from experiments.study import network, tuning
from experiments.study.analysis.results import ACCURACY, measure
from experiments.study.grid import (
    Cell,
    Loader,
    Point,
    below,
    final_cell,
    points,
    tuning_cell,
    tuning_cells,
)
from experiments.study.progress import StudyProgress, progress
from experiments.study.spec import Spec
from experiments.tasks.contract import check_apply, check_model
from experiments.training import records
from experiments.training.components import takes
from experiments.training.prepared import (
    PreparedRun,
    initialized,
    record_config,
    reseeded,
    train_and_record,
)
from experiments.training.records import Progress


class _Stop(Exception):
    """The user asked to stop."""


class Planned(NamedTuple):
    """The runs that there are to make.

    Attributes:
        spec: of the study.
        seeds: of the runs that are reported.
        points: the algorithms, at every value of the sweep.
        tried: for each point, the runs that tune it.
        loader: of plans.
    """

    spec: Spec
    seeds: range
    points: list[Point]
    tried: list[list[Cell]]
    loader: Loader


def planned(spec: Spec, seeds: range) -> Planned:
    """Checks the runs that may come, and writes nothing.

    Of a range its ends are tried, unless its numbers are whole (`Range.telling`).

    Raises:
        BadRequest: settings that a run cannot have.
    """
    loader = Loader()
    found = points(spec, loader)
    for point in found if spec.tune else ():
        for trial in spec.telling(point.entry):
            cell = tuning_cell(spec, point, trial)
            loader.components(cell.argv, cell.seeds[0])
    tried = [[cell for _, cell in tuning_cells(spec, point)] for point in found]
    return Planned(spec, seeds, found, tried, loader)


def check_measure(plan: Planned, key: str | None, target: float | None) -> None:
    """Raises a ValueError for a measure that no run will have, or its target.

    Args:
        plan: of the study.
        key: of the measure; None takes the accuracy, where there is one.
        target: of its figure; None asks for none.
    """
    if key is None and target is None:
        return
    first = plan.loader.components(plan.points[0].argv, plan.seeds[0])
    with explained(TASK.flag, plan.spec.task):
        params, buffers = check_model(first.task, plan.seeds[0])
        values = check_apply(first.task, params, buffers, first.data.test)
    names = {f"test_{name}" for name in (*values, *first.task.figures)}
    by = measure(key, [dict.fromkeys(names, 1.0) | {"diverged": False}])
    if target is not None and by is ACCURACY and target > 1:
        raise ValueError(f"--target {target:g}: an accuracy is at most 1: say 0.95")


def make_runs(
    plan: Planned,
    out: Path,
    measure_key: str | None,
    asked_to_stop: Callable[[], int],
) -> list[tuple[Point, Cell]] | None:
    """Makes all runs that are not there, and returns those to report, by point.

    Args:
        plan: which runs there are.
        out: the study's folder.
        measure_key: by what to tune; None takes the accuracy, where there is one.
        asked_to_stop: looked at after each dispatch; what is done stays, the run under
            way is made again next time, and None is returned.

    Raises:
        ValueError: the runs have no such measure.
        OSError: what cannot be written; runs that are done stay.
    """
    tried = [[below(cell, out) for cell in cells] for cells in plan.tried]

    def final(number: int) -> Cell:
        point, best = plan.points[number], {}
        if plan.tried[number]:
            results = tuning.trials(plan.spec, point, out)
            summaries = [s for _, found in results for s in found]
            best = tuning.chosen(results, measure(measure_key, summaries))
        return below(final_cell(point, best, plan.seeds), out)

    total = sum(len(cell.seeds) for cell in chain.from_iterable(tried))
    missing = sum(len(cell.missing()) for cell in chain.from_iterable(tried))
    for number, cells in enumerate(tried):
        total += len(plan.seeds)
        tuned = not any(cell.missing() for cell in cells)
        missing += len(final(number).missing() if tuned else plan.seeds)
    made = []
    with progress(total, total - missing) as bar:
        if missing < total:
            bar.say(f"{total - missing} of {total} runs are there already")
        else:
            bar.say(f"{total} runs to make")
        try:
            for cell in chain.from_iterable(tried):
                _make(cell, plan.loader, bar, asked_to_stop)
            for number, point in enumerate(plan.points):
                cell = final(number)
                _make(cell, plan.loader, bar, asked_to_stop)
                made.append((point, cell))
        except _Stop:
            bar.say(f"stopped after {bar.done} of {total} runs")
            return None
    return made


def _make(
    cell: Cell, loader: Loader, bar: StudyProgress, asked_to_stop: Callable[[], int]
) -> None:
    """Makes the runs of a cell that are missing, all with one compiled program."""
    job: PreparedRun | None = None
    for seed in cell.missing():
        if bar.made and asked_to_stop():  # before, nothing would be lost
            raise _Stop
        if job is None:
            job = initialized(loader.components(cell.argv, seed))
            if job.untrained:
                bar.say(
                    f"{cell.name}: the figures will be of the model as it was at the "
                    f"start: {job.untrained}"
                )
        elif takes(job.config, "seed"):
            job = initialized(loader.components(cell.argv, seed))
        else:
            job = reseeded(job, seed)
        _run(job, cell, seed, bar, asked_to_stop)
    if job is not None:
        jax.clear_caches()  # else the programs of all cells stay: 30 MB each


def _run(
    job: PreparedRun,
    cell: Cell,
    seed: int,
    bar: StudyProgress,
    asked_to_stop: Callable[[], int],
) -> None:
    """Makes one run; its folder gets its name when all its files are there."""
    started = time.perf_counter()
    bar.begin(f"{cell.name}, seed {seed}", job.config.steps)
    unfinished = cell.folder / f".seed-{seed}"
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [*flags.PROGRAM.split(), *cell.argv, "--seed", str(seed)]
    record_config(job, command, unfinished, [])
    outcome, summary = train_and_record(job, unfinished, bar, asked_to_stop)
    if outcome.stopped:
        raise _Stop
    summary["total_seconds"] = round(time.perf_counter() - started, 3)
    summary["sends"] = _sends(job, outcome.progress)
    records.finish(unfinished, summary, outcome.progress.lines)
    unfinished.replace(cell.run(seed))
    bar.end(_result(summary))


def _sends(job: PreparedRun, progress: Progress) -> dict | None:
    """What each worker sends, step by step, and how late it may arrive."""
    if (sent := job.count(progress)) is None:
        return None
    s = job.config
    waits = s.opt_state_at_sync == "average" or job.task.kept == "shared"
    delay = 0 if waits else network.delay_of(s.algo, s.arguments)
    return {**network.to_json(network.sends(sent)), "delay": delay}


def _result(summary: dict) -> str:
    if summary["diverged"]:
        return f"diverged at step {summary['diverged_at']}"
    shown = {k: x for k, x in terminal.measured(summary).items() if x is not None}
    figures = [f"{name} {terminal.figure(x)}" for name, x in shown.items()]
    return ", ".join([*figures, f"{summary['total_seconds']:.1f} s"])
