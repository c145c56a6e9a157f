"""Makes the missing runs of a study by jobs: a Dask task for each run.

A Dask worker makes one run at a time, in its own process. It must see the study's
folder: the run's files appear there, and the task returns only how the run ended.
"""

import importlib.util
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
from experiments.study.running.cluster import ANSWER, cluster
from experiments.study.running.maker import Made, Refused, Stepped, Stopped, described
from experiments.study.running.plan import Missing, Plan
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
    """A run that a worker makes.

    Attributes:
        run: the run.
        address: of the worker.
        future: its Dask task.
        line: its display.
        moved: the time of its last step.
    """

    run: Missing
    address: str
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
        if importlib.util.find_spec("bokeh"):  # it draws the pages
            bar.say(f"dashboard: {client.dashboard_link}")
        Jobs(client, _order(config, plan), plan, bar).make(asked_to_stop)


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
    """The runs that the workers of a cluster make.

    Args:
        client: the client of the scheduler.
        order: what all tasks have in common.
        plan: the missing runs.
        bar: the display of the runs.
    """

    def __init__(
        self, client: "Client", order: worker.Order, plan: Plan, bar: StudyProgress
    ):
        self._client: Any = client  # its types know only its asynchronous calls
        self._order, self._plan, self._bar = order, plan, bar
        self._checks = dict[str, Any]()  # futures, by the address of their worker
        self._last = dict[str, int]()  # the number of each worker's last run
        self._jobs = list[Job]()
        self._losses = Counter[Path]()
        self._idle_since = time.monotonic()
        self._inbox = queue.SimpleQueue[tuple[float, Any]]()
        # Called in another thread.
        client.subscribe_topic(order.topic, self._inbox.put)

    def make(self, asked_to_stop: Callable[[], int]) -> None:
        """Makes all runs; raises the same errors as the function `make`."""
        while not self._plan.is_over:
            if asked_to_stop():
                raise Stopped
            self._step()
            time.sleep(TICK)

    def _step(self) -> None:
        """Handles what has happened, and gives runs to free workers."""
        fit = self._fit(self._present())
        self._listen()
        for job in [*self._jobs]:
            if job.future.done() or job.address not in fit:
                self._jobs.remove(job)
                self._end(job)
        for address in sorted(fit - {job.address for job in self._jobs}):
            if run := self._plan.take(self._last.get(address)):
                self._begin(address, run)
        self._tell_silence()

    def _present(self) -> set[str]:
        """Returns the addresses of all workers; a ConnectionError without an answer."""
        client = self._client
        try:
            if client.status != "running":
                raise ConnectionError
            ask = client.scheduler.ncores
            return {*client.sync(ask, callback_timeout=SCHEDULER_LOST_AFTER)}
        except OSError:
            raise ConnectionError("the Dask scheduler is lost") from None

    def _fit(self, present: set[str]) -> set[str]:
        """Has new workers check themselves; returns those that can make runs."""
        # A worker may come back at its address, with other code.
        self._checks = {
            x: self._checks.get(x) or self._submit(x, worker.check) for x in present
        }
        unfit = {x: y for x, y in self._checks.items() if y.status == "error"}
        for address, check in unfit.items():
            line = described(check.exception()).line
            if self._client.cluster is not None:  # no other worker will come
                raise BadRequest(line)
            self._bar.say_once(f"the Dask worker {address} is refused: {line}")
        return {x for x, check in self._checks.items() if check.status == "finished"}

    def _submit(self, address: str, function: Callable, *given: Any) -> Any:
        """Starts a task that calls a function of `worker` on a worker."""
        place = {"workers": [address], "pure": False}
        # A worker ends if it cannot import what a task names. So tasks name only the
        # standard library, which then imports our code, or raises an error.
        name = f"{function.__module__}:{function.__name__}"
        found = self._client.submit(pkgutil.resolve_name, name, **place)
        order = tuple(self._order)
        return self._client.submit(operator.call, found, order, *given, **place)

    def _begin(self, address: str, run: Missing) -> None:
        """Has a worker make a run."""
        given = run.number, run.argv, str(run.folder.absolute())
        future = self._submit(address, worker.make_run, *given)
        self._jobs.append(Job(run, address, future, self._bar.begin(run.name)))
        self._last[address] = run.number

    def _listen(self) -> None:
        """Shows the steps that the workers have told."""
        jobs = {job.future.key: job for job in self._jobs}
        while not self._inbox.empty():
            _, (key, news) = self._inbox.get()
            if job := jobs.get(key):
                job.moved = time.monotonic()
                job.line.show(news if isinstance(news, str) else Stepped(*news))

    def _end(self, job: Job) -> None:
        """Counts a run that has ended, or takes it back if its worker is lost."""
        if outcome := self._outcome(job):
            job.line.end(outcome)
            self._plan.ended(job.run, outcome)
        else:
            job.line.drop()
            self._bar.say(f"{job.run.name}: {_gone(job)}; the run starts again")
            self._plan.give_back(job.run)

    def _outcome(self, job: Job) -> Made | Refused | None:
        """Returns how a run ended; None if it must start again."""
        if not job.future.done():
            return self._lost(job)
        try:
            outcome = job.future.result(ANSWER)
        except (Stopped, TimeoutError):  # the worker ends, or has just done so
            return self._lost(job)
        except OSError:  # a full disk would stop all others, too
            raise
        except Exception as error:
            return described(error)
        if isinstance(outcome, Made) and not _is_seen(job.run.folder):
            return Refused("its files do not appear in the study's folder")
        return outcome

    def _lost(self, job: Job) -> Refused | None:
        """Counts a lost worker of a run, which is given up after some."""
        self._losses[job.run.folder] += 1
        if self._losses[job.run.folder] < MOST_LOSSES:
            return None
        return Refused(f"given up after {MOST_LOSSES} times: {_gone(job)}")

    def _tell_silence(self) -> None:
        """Names runs that take no step, and tells that there is no worker."""
        now = time.monotonic()
        for job in self._jobs:
            if now - job.moved > SILENCE:
                job.moved = math.inf  # said once, until its next step
                self._bar.say(
                    f"{job.run.name}: no step for {SILENCE:g} s on the Dask worker "
                    f"{job.address}: it compiles, is busy or hangs"
                )
        if self._jobs:
            self._idle_since = now
        elif now - self._idle_since > SILENCE:
            self._idle_since = math.inf  # said once, until there is a run
            self._bar.say("no Dask worker is available: waiting for one")


def _gone(job: Job) -> str:
    return f"the Dask worker {job.address} is gone"


def _is_seen(folder: Path) -> bool:
    """Waits for the files of a run from another machine; returns whether they came."""
    deadline = time.monotonic() + SEEING
    while not is_done(folder) and time.monotonic() < deadline:
        # NFS remembers for a while that a file was missing; listing refreshes it.
        os.listdir(folder.parent)
        time.sleep(TICK)
    return is_done(folder)
