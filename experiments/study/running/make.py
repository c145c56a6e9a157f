"""Makes the missing runs of a study, here or on a cluster."""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import jax

from experiments.launch.cluster.connection import cluster, dashboard
from experiments.launch.cluster.roster import Roster
from experiments.launch.cluster.view import ClusterView
from experiments.launch.cluster.workers import expected
from experiments.study.config import StudyConfig
from experiments.study.grid import Loader
from experiments.study.running import jobs, serial, versions
from experiments.study.running.maker import Stopped
from experiments.study.running.member import Terms
from experiments.study.running.plan import Plan
from experiments.study.running.progress import StudyProgress, progress
from experiments.study.running.workers import Workers
from experiments.training import prepared
from experiments.training.components import cores, environment

LOSS = 60.0  # seconds without an answer after which a scheduler counts as lost


def make_runs(
    config: StudyConfig, plan: Plan, loader: Loader, asked_to_stop: Callable[[], int]
) -> bool:
    """Makes all runs of a plan; returns whether it came to its end.

    Args:
        config: of the study, whose folder is open.
        plan: the missing runs.
        loader: prepares runs in this process.
        asked_to_stop: called after each dispatch, or all the time. Then runs under way
            are discarded, and those done are kept.

    Raises:
        ValueError: the runs lack the measure.
        OSError: a file cannot be written; runs that are done stay.
        Unreachable: no scheduler answers.
        Lost: the scheduler is gone.
    """
    missing = plan.total - plan.done
    with progress(plan.total, plan.done) as bar, cleaned(config.folder):
        there = f"{plan.done} of {plan.total} runs are there already"
        bar.say(there if plan.done else f"{plan.total} runs to make")
        try:
            if config.is_parallel and missing:
                _make_by_jobs(config, plan, bar, asked_to_stop)
            else:
                serial.make(plan, loader, bar, asked_to_stop)
        except Stopped:
            bar.say(f"stopped after {bar.done} of {plan.total} runs")
            return False
    return True


@contextmanager
def cleaned(out: Path) -> Iterator[None]:
    """Removes what is left of runs whose process was killed, now or in another time."""
    try:
        yield
    finally:
        both = (out.glob(f"{kind}/*/**/.seed-*") for kind in ("runs", "tuning"))
        for unfinished in chain(*both):
            if re.fullmatch(r"\.seed-\d+-[0-9a-f]{8}", unfinished.name):
                shutil.rmtree(unfinished, ignore_errors=True)


def _make_by_jobs(
    config: StudyConfig,
    plan: Plan,
    bar: StudyProgress,
    asked_to_stop: Callable[[], int],
) -> None:
    """Makes all runs of a plan on a cluster."""
    study = secrets.token_hex(8)
    terms = Terms(
        study=study,
        directory=os.getcwd(),
        own=versions.of_modules(config.factories),
        environment=job_environment(config.devices_per_job),
    )
    # One that this command has loaded itself, and that no run has to be made for.
    first = plan.planned[0]
    with cluster(config.scheduler, min(config.jobs, plan.total - plan.done)) as client:
        bar.say(f"dashboard: {dashboard(client)}")
        meant = expected(prepared.versions(), config.factories)
        where = config.scheduler or "of this command"
        workers = Workers(
            client,
            ClusterView(client, where, LOSS),
            Roster(client, meant, config.folder.absolute(), bar.say),
            terms,
            (first.argv, first.seeds[0]),
            bar,
        )
        jobs.make(plan, workers, asked_to_stop)


def job_environment(devices: int | None) -> dict[str, str]:
    """Returns the variables of the jobs' processes: their devices and threads.

    They are those of this process, so that the jobs' bits are, wherever they run.
    """
    if devices is not None:
        return environment(devices, devices)
    if jax.default_backend() != "cpu":
        return {}
    threads = os.environ.get("NPROC", str(cores()))
    return environment(jax.local_device_count(), int(threads))
