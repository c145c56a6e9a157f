"""Makes the missing runs of a study by jobs: a Dask task for each share of runs."""

import math
import os
import queue
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from experiments.cli.errors import BadRequest
from experiments.launch.cluster.connection import cluster, dashboard
from experiments.launch.cluster.view import ClusterView
from experiments.launch.cluster.workers import Roster, Seat, expected
from experiments.study.config import StudyConfig
from experiments.study.grid import is_done
from experiments.study.running import messages, versions
from experiments.study.running.maker import Stopped, unfinished
from experiments.study.running.member import Order, make_share
from experiments.study.running.plan import Plan, Share
from experiments.study.running.progress import RunLine, StudyProgress
from experiments.training import records
from experiments.training.devices import cores, environment
from experiments.training.versions import versions as of_packages

if TYPE_CHECKING:
    from distributed import Client, Future

# Seconds.
TICK = 0.05  # between two looks at messages
SCHEDULER_LOST_AFTER = 60.0  # without an answer, until a scheduler counts as lost
FAREWELL = 5.0  # for the workers to end their processes
# A worker gets no work for so long after a job has ended, depending on the fault. With
# nobody at fault, the worker may be retiring, and gets time to leave.
RESTS = {"run": 0.0, "worker": math.inf, "nobody": 5.0}
SEEING = 60.0  # until files from another machine must be visible
PATIENCE = 30.0  # without a worker, until the user is told

SETTINGS = "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"
MOST_KILLS = 3  # how often a run's process may die before the run is given up


@dataclass(eq=False)
class Job:
    """A share that a worker makes.

    Attributes:
        seat: the worker.
        share: the runs that it has not made yet.
        future: the Dask task.
        line: the display of the first run.
    """

    seat: Seat
    share: Share
    future: "Future"
    line: RunLine

    @property
    def worker(self) -> str:
        """The worker, as text for the user."""
        return f"the Dask worker {self.seat.address} on {self.seat.host[0]}"


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
    with cluster(config.scheduler, min(config.jobs, plan.total - plan.done)) as client:
        bar.say(f"dashboard: {dashboard(client)}")
        jobs = Jobs(client, config, plan, bar)
        try:
            jobs.make(asked_to_stop)
        finally:
            jobs.close()


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


class Jobs:
    """The jobs of a study; arguments as in `make`."""

    def __init__(
        self, client: "Client", config: StudyConfig, plan: Plan, bar: StudyProgress
    ):
        first = plan.planned[0]
        self._order = Order(
            study=secrets.token_hex(8),
            directory=os.getcwd(),
            environment={
                **job_environment(config.devices_per_job),
                "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            },
            settings={name: getattr(jax.config, name) for name in SETTINGS},
            own=versions.of_modules(config.factories),
            # This command has loaded the same run's data.
            first=[*first.argv, "--seed", str(first.seeds[0])],
        )
        meant = expected(of_packages(), config.factories)
        self._client, self._plan, self._bar = client, plan, bar
        self._view = ClusterView(
            client, config.scheduler or "of this command", SCHEDULER_LOST_AFTER
        )
        self._roster = Roster(client, meant, config.folder.absolute(), bar.say)
        self._jobs = dict[str, Job]()  # by the key of their task
        self._lingering = set[str]()  # keys of tasks whose process may run
        self._kills = Counter[Path]()
        self._barred = dict[str, float]()  # worker -> the time until it gets no work
        self._devices = ""  # the devices of every process, in words
        self._waits_since = time.monotonic()
        self._inbox = queue.SimpleQueue[dict[str, Any]]()
        # Called in another thread.
        client.subscribe_topic(
            self._order.study, lambda event: self._inbox.put(event[1])
        )

    def make(self, asked_to_stop: Callable[[], int]) -> None:
        """Makes all runs; raises the same errors as the function `make`."""
        while not self._plan.is_over:
            if asked_to_stop():
                raise Stopped
            if line := self._view.lost:
                raise ConnectionError(line)
            self._hand_out(self._view.workers)
            self._listen()

    def close(self) -> None:
        """Ends all processes of the study, on all workers."""
        self._roster.close()
        self._view.close()
        if self._client.status != "running":
            return
        self._client.cancel([job.future for job in self._jobs.values()], force=True)
        self._jobs.clear()
        deadline = time.monotonic() + FAREWELL
        while self._lingering and time.monotonic() < deadline:
            self._listen()

    def _hand_out(self, present: frozenset[str]) -> None:
        """Takes back the jobs of lost workers, and gives shares to the others."""
        for key, job in [*self._jobs.items()]:
            if job.seat.address not in present:
                self._take(key, messages.Ended(f"{job.worker} is gone"))
            elif job.future.status in ("error", "cancelled", "lost"):
                self._take(key, messages.Ended(f"its Dask task failed: {job.future}"))
        self._roster.update(present)
        now = time.monotonic()
        self._barred = {x: t for x, t in self._barred.items() if x in present}
        fit = present - {x for x, until in self._barred.items() if now < until}
        busy = Counter(job.seat.address for job in self._jobs.values())
        slots = {address: self._view.threads(address) for address in fit}
        free = [
            seat
            for seat in self._roster.seats.values()
            for _ in range(slots.get(seat.address, 0) - busy[seat.address])
        ]
        while free and (share := self._plan.take(sum(slots.values()))) is not None:
            self._begin(free.pop(0), share)
        if self._jobs:
            self._waits_since = now
        elif now - self._waits_since > PATIENCE:
            self._bar.say("no Dask worker is available: waiting for one")
            self._waits_since = math.inf  # said once, until a worker is available

    def _begin(self, seat: Seat, share: Share) -> None:
        """Has a worker make a share."""
        name = share.runs[0].name
        key = f"{name}-{secrets.token_hex(4)}"
        runs = [(run.argv, str(run.folder.absolute())) for run in share.runs]
        order = self._order._replace(runs=runs, sends=not seat.sees_out)
        future = self._client.submit(
            make_share, order, workers=[seat.address], key=key, pure=False, retries=0
        )
        self._jobs[key] = Job(seat, share, future, self._bar.begin(name))
        self._lingering.add(key)

    def _listen(self) -> None:
        """Handles the messages that arrive within a short time."""
        time.sleep(TICK)
        while not self._inbox.empty():
            event = self._inbox.get()
            self._take(event["key"], messages.decode(event["message"]))

    def _take(self, key: str, message: messages.Message) -> None:
        """Handles a message from a job's process."""
        if isinstance(message, messages.Ended):
            self._lingering.discard(key)
        if (job := self._jobs.get(key)) is None:  # it was given up
            return
        match message:
            case messages.Ready(devices):
                self._devices = self._devices or devices
                if devices != self._devices:
                    why = f"it uses {devices} devices, the others {self._devices}"
                    self._end(key, why, "worker")
            case messages.Stepped() | messages.Noted():
                job.line.show(message)
            case messages.Refused(why, is_full=True) if job.seat.sees_out:
                raise OSError(why)
            case messages.Made(_, files) if files is not None:
                _write(job.share.runs[0].folder, files)
                self._settle(job, message)
            case messages.Made() if not _is_seen(job.share.runs[0].folder):
                why = "its files do not appear in the study's folder"
                self._settle(job, messages.Refused(why))
            case messages.Made() | messages.Refused():
                self._settle(job, message)
            case messages.Ended(why, fault):
                self._end(key, why, fault)

    def _settle(self, job: Job, outcome: messages.Made | messages.Refused) -> None:
        """Ends the current run of a job, and shows the next one."""
        job.line.end(outcome)
        self._plan.ended(job.share, outcome)
        if job.share.runs:
            job.line = self._bar.begin(job.share.runs[0].name)

    def _end(self, key: str, why: str, fault: str) -> None:
        """Ends a job and its process; another job makes its remaining runs."""
        job, now = self._jobs.pop(key), time.monotonic()
        if fault == "worker":
            if self._client.cluster is not None:  # no other worker will come
                raise BadRequest(why)
            self._bar.say_once(f"{job.worker} is refused: {why}")
        elif job.share.runs:
            run = job.share.runs[0]
            self._kills[run.folder] += fault == "run"
            if self._kills[run.folder] < MOST_KILLS:
                self._bar.say(f"{run.name}: {why}; the run starts again")
            else:
                text = f"given up after {MOST_KILLS} times: {why}"
                self._settle(job, messages.Refused(text))
        until = self._barred.get(job.seat.address, now)
        self._barred[job.seat.address] = max(until, now + RESTS[fault])
        # Otherwise it would start again if a lost worker came back.
        self._client.cancel([job.future], force=True)
        if job.share.runs:
            job.line.drop()
        self._plan.give_back(job.share)


def _is_seen(folder: Path) -> bool:
    """Waits for the files of a run from another machine; returns whether they came."""
    deadline = time.monotonic() + SEEING
    while not is_done(folder) and time.monotonic() < deadline:
        # NFS remembers for a while that a file was missing; listing refreshes it.
        os.listdir(folder.parent)
        time.sleep(TICK)
    return is_done(folder)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the files of a run that was made without access to the study's folder."""
    with unfinished(folder) as place:
        place.mkdir(parents=True)
        for name, content in files.items():
            records.write(place / name, content)
