"""Makes the missing runs of a study by jobs: a Dask task for each run.

Each Dask worker makes one run at a time, of one share. It must see the study's folder:
there its files appear, and a task returns only how its run ended.
"""

import math
import operator
import os
import pkgutil
import queue
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from experiments.checkpoint import lock
from experiments.cli.errors import BadRequest
from experiments.study.config import StudyConfig
from experiments.study.grid import is_done
from experiments.study.running import worker
from experiments.study.running.cluster import ANSWER, cluster, dashboard
from experiments.study.running.maker import Made, Refused, Stepped, Stopped, described
from experiments.study.running.plan import Plan, Share
from experiments.study.running.progress import RunLine, StudyProgress
from experiments.training.devices import cores, environment

if TYPE_CHECKING:
    from distributed import Client, Future

# Seconds.
TICK = 0.05  # between two looks at the workers
SCHEDULER_LOST_AFTER = 60.0  # without an answer
SILENCE = 60.0  # without a step or a worker, until the user is told
SEEING = 60.0  # until files from another machine must be visible

MOST_LOSSES = 3  # how often a run's worker may be lost before the run is given up
SETTINGS = "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"


@dataclass(eq=False)
class Job:
    """A share that a worker makes, run by run.

    Attributes:
        address: of the worker.
        share: the runs that it has not made yet.
        future: the Dask task of the first run.
        line: the display of the first run.
        moved: the time of its last step.
    """

    address: str
    share: Share
    future: "Future"
    line: RunLine
    moved: float = field(default_factory=time.monotonic)


def make(
    config: StudyConfig,
    plan: Plan,
    bar: StudyProgress,
    asked_to_stop: Callable[[], int],
) -> None:
    """Makes all runs of a plan on a cluster.

    Args:
        config: the config of the study.
        plan: the missing runs.
        bar: the display of the runs.
        asked_to_stop: function that is polled all the time.

    Raises:
        BadRequest: the workers of this command's own cluster are unfit.
        Stopped: the user asked to stop. Runs in progress are discarded.
        OSError: a file cannot be written, or the scheduler is gone. Completed runs are
            kept.
        Unreachable: no scheduler answers.
    """
    count = min(config.jobs, plan.total - plan.done)
    with cluster(config.scheduler, count) as client:
        bar.say(f"dashboard: {dashboard(client)}")
        jobs = Jobs(client, _order(config, plan), plan, bar)
        while not plan.is_over:
            if asked_to_stop():
                raise Stopped
            jobs.step()
            time.sleep(TICK)


def job_environment(devices: int | None) -> dict[str, str]:
    """Returns environment variables of the jobs' processes: devices and threads.

    They match this process, so that jobs give the same bits wherever they run.
    """
    if devices is not None:
        return environment(devices, devices)
    if jax.default_backend() != "cpu":
        return {}
    threads = os.environ.get("NPROC", str(cores()))
    return environment(jax.local_device_count(), int(threads))


def _order(config: StudyConfig, plan: Plan) -> worker.Order:
    """Returns what all tasks have in common."""
    environ = job_environment(config.devices_per_job)
    environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    folder, first = config.folder.absolute(), plan.planned[0]
    return worker.Order(
        folder=str(folder),
        holder=(folder / lock.NAME).read_text(),
        topic=secrets.token_hex(8),
        directory=os.getcwd(),
        environ=environ,
        settings={name: getattr(jax.config, name) for name in SETTINGS},
        factories=config.factories,
        facts=worker.facts(config.factories, environ),
        first=[*first.argv, "--seed", str(first.seeds[0])],
    )


class Jobs:
    """The workers of a study, and the runs that they make.

    Args:
        client: the client of the scheduler.
        order: what all tasks have in common.
        plan: the missing runs.
        bar: the display of the runs.
    """

    def __init__(
        self, client: "Client", order: worker.Order, plan: Plan, bar: StudyProgress
    ):
        self._client, self._order = client, order
        self._plan, self._bar = plan, bar
        self._checks: dict[str, Future] = {}  # by the address of their worker
        self._checked, self._fit = set[str](), set[str]()  # addresses of workers
        self._jobs = list[Job]()
        self._losses = Counter[Path]()
        self._idle_since = time.monotonic()
        self._inbox = queue.SimpleQueue[tuple[float, Any]]()
        # Called in another thread.
        client.subscribe_topic(order.topic, self._inbox.put)

    def step(self) -> None:
        """Handles what has happened, and gives runs to free workers."""
        present = self._present()
        self._check(present)
        self._listen()
        for job in [*self._jobs]:
            if job.future.done():
                self._end(job)
            elif job.address not in present:
                self._lose(job)
        busy = {job.address for job in self._jobs}
        for address in sorted(self._fit - busy):
            if share := self._plan.take(len(self._fit)):
                self._begin(address, share)
        self._tell_silence()

    def _present(self) -> set[str]:
        """Returns the addresses of the scheduler's workers.

        Raises:
            ConnectionError: it does not answer.
        """
        client = self._client
        try:
            if client.status != "running":
                raise ConnectionError
            ask = client.scheduler.ncores
            return {*client.sync(ask, callback_timeout=SCHEDULER_LOST_AFTER)}
        except OSError:
            raise ConnectionError("the Dask scheduler is lost") from None

    def _check(self, present: set[str]) -> None:
        """Has each new worker check itself, and bars those that are unfit."""
        for address in present - self._checked:
            self._checks[address] = self._submit(address, worker.check)
        # A worker may come back at its address, with other code.
        self._checked, self._fit = present, self._fit & present
        for address, future in [*self._checks.items()]:
            if address not in present:
                del self._checks[address]
            elif future.done():
                del self._checks[address]
                if (error := future.exception()) is None:
                    self._fit.add(address)
                    continue
                line = described(error).line
                if self._client.cluster is not None:  # no other worker will come
                    raise BadRequest(line)
                self._bar.say(f"the Dask worker {address} is refused: {line}")

    def _listen(self) -> None:
        """Shows the steps that the workers have told."""
        by_key = {job.future.key: job for job in self._jobs}
        while not self._inbox.empty():
            _, (key, news) = self._inbox.get()
            if job := by_key.get(key):
                job.moved = time.monotonic()
                job.line.show(news if isinstance(news, str) else Stepped(*news))

    def _submit(self, address: str, function: Callable, *given: Any) -> "Future":
        """Starts a task that calls a function of `worker` on a worker."""
        place = {"workers": [address], "pure": False}
        # The scheduler and the worker end or fall silent if they cannot import what a
        # task names: so tasks name the standard library alone, which then imports.
        name = f"{function.__module__}:{function.__name__}"
        found = self._client.submit(pkgutil.resolve_name, name, **place)
        order = tuple(self._order)
        return self._client.submit(operator.call, found, order, *given, **place)

    def _begin(self, address: str, share: Share) -> None:
        """Has a worker make the first run of a share."""
        run = share.runs[0]
        given = share.number, run.argv, str(run.folder.absolute())
        future = self._submit(address, worker.make_run, *given)
        self._jobs.append(Job(address, share, future, self._bar.begin(run.name)))

    def _end(self, job: Job) -> None:
        """Counts a run that its worker has made, and has it make the next one."""
        try:
            outcome = job.future.result(ANSWER)
        except (Stopped, TimeoutError):  # the worker ends, or has just done so
            return self._lose(job)
        except OSError:  # a full disk would stop all others, too
            raise
        except Exception as error:
            outcome = described(error)
        if isinstance(outcome, Made) and not _is_seen(job.share.runs[0].folder):
            outcome = Refused("its files do not appear in the study's folder")
        self._settle(job, outcome)
        if job.share.runs:
            self._begin(job.address, job.share)

    def _lose(self, job: Job) -> None:
        """Takes back the runs of a lost worker; one that has lost many is given up."""
        run, why = job.share.runs[0], f"the Dask worker {job.address} is gone"
        self._losses[run.folder] += 1
        if self._losses[run.folder] == MOST_LOSSES:
            text = f"given up after {MOST_LOSSES} times: {why}"
            self._settle(job, Refused(text))
        else:
            self._bar.say(f"{run.name}: {why}; the run starts again")
            self._jobs.remove(job)
            job.line.drop()
        self._plan.give_back(job.share)

    def _settle(self, job: Job, outcome: Made | Refused) -> None:
        """Counts and shows the end of a run."""
        self._jobs.remove(job)
        job.line.end(outcome)
        self._plan.ended(job.share, outcome)

    def _tell_silence(self) -> None:
        """Names runs that take no step, and tells that there is no worker."""
        now = time.monotonic()
        for job in self._jobs:
            if now - job.moved > SILENCE:
                job.moved = math.inf  # said once, until its next step
                self._bar.say(
                    f"{job.share.runs[0].name}: no step for {SILENCE:g} s on the Dask "
                    f"worker {job.address}: it compiles, is busy or hangs"
                )
        if self._jobs:
            self._idle_since = now
        elif now - self._idle_since > SILENCE:
            self._idle_since = math.inf  # said once, until there is a run
            self._bar.say("no Dask worker is available: waiting for one")


def _is_seen(folder: Path) -> bool:
    """Waits for the files of a run from another machine; returns whether they came."""
    deadline = time.monotonic() + SEEING
    while not is_done(folder) and time.monotonic() < deadline:
        # NFS remembers for a while that a file was missing; listing refreshes it.
        os.listdir(folder.parent)
        time.sleep(TICK)
    return is_done(folder)
