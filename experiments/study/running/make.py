"""Makes the missing runs of a study, here or by jobs."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import jax

from experiments.study.config import StudyConfig
from experiments.study.grid import Loader
from experiments.study.running import jobs
from experiments.study.running.maker import Maker, Stopped
from experiments.study.running.plan import Plan
from experiments.study.running.progress import StudyProgress, progress


def make_runs(
    config: StudyConfig, plan: Plan, loader: Loader, asked_to_stop: Callable[[], int]
) -> bool:
    """Makes all runs of a plan; returns whether it finished.

    Args:
        config: the config of the study, whose folder is open.
        plan: the missing runs.
        loader: prepares runs in this process.
        asked_to_stop: function that is called after each dispatch, or all the time. If
            it asks to stop, runs in progress are discarded and completed ones are kept.

    Raises:
        ValueError: the runs lack the measure.
        OSError: a file cannot be written, or the scheduler is gone. Completed runs are
            kept.
        Unreachable: no scheduler answers.
    """
    missing = plan.total - plan.done
    with progress(plan.total, plan.done) as bar, cleaned(config.folder):
        there = f"{plan.done} of {plan.total} runs are already complete"
        bar.say(there if plan.done else f"{plan.total} runs to make")
        try:
            if config.is_parallel and missing:
                jobs.make(config, plan, bar, asked_to_stop)
            else:
                _make_here(plan, loader, bar, asked_to_stop)
        except Stopped:
            bar.say(f"stopped after {bar.done} of {plan.total} runs")
            return False
    return True


def _make_here(
    plan: Plan, loader: Loader, bar: StudyProgress, asked_to_stop: Callable[[], int]
) -> None:
    """Makes all runs of a plan in this process, one after the other."""
    maker, number = Maker(loader), 0
    while (run := plan.take(number)) is not None:
        if run.number != number:
            # Otherwise the programs of all variants stay in memory, 30 MB each.
            maker, number = Maker(loader), run.number
            jax.clear_caches()
        # Before the first run nothing can be lost: the signal ends the process.
        if bar.made and asked_to_stop():
            raise Stopped
        line = bar.begin(run.name)
        outcome = maker.make(run.config, run.folder, line.show, asked_to_stop)
        line.end(outcome)
        plan.ended(run, outcome)


@contextmanager
def cleaned(out: Path) -> Iterator[None]:
    """Removes the remains of runs whose process was killed, now or earlier."""
    try:
        yield
    finally:
        both = (out.glob(f"{kind}/*/**/.seed-*") for kind in ("runs", "tuning"))
        for unfinished in chain(*both):
            if re.fullmatch(r"\.seed-\d+-[0-9a-f]{8}", unfinished.name):
                shutil.rmtree(unfinished, ignore_errors=True)
