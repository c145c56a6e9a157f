"""Makes the missing runs of a study by jobs on a Dask cluster."""

import math
import os
import queue
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.study.grid import is_done
from experiments.study.running import member
from experiments.study.running.maker import Stopped, unfinished
from experiments.study.running.plan import Failure, Plan, Run, Share
from experiments.study.running.progress import RunLine, StudyProgress
from experiments.study.running.workers import Answer, Worker, Workers
from experiments.training import records

if TYPE_CHECKING:
    from distributed import Client, Future

TICK = 0.1  # seconds between two looks at messages
MOST_KILLS = 3  # of its process, after which a run is given up
FAREWELL = 5.0  # seconds for the workers to end their processes
REST = 5.0  # seconds for a worker that retires to leave
SEEING = 60.0  # seconds for the files of another machine to be seen
PATIENCE = 30.0  # seconds without a worker after which the user hears of it


class Lost(OSError):
    """The scheduler is gone; the message is one line for the user."""


@dataclass(eq=False)
class Job:
    """A place for one run at a time on a worker.

    Attributes:
        worker: on which it lies.
        share: the runs that it makes.
        run: the one that it makes now.
        line: where that is shown.
        future: its Dask task.
        began: when that was sent, by time.monotonic().
        rests_until: when it may begin the next one.
    """

    worker: Worker
    share: Share | None = None
    run: Run | None = None
    line: RunLine | None = None
    future: "Future | None" = None
    began: float = 0.0
    rests_until: float = 0.0


def make(plan: Plan, workers: Workers, asked_to_stop: Callable[[], int]) -> None:
    """Makes all runs of a plan.

    Args:
        plan: the missing runs.
        workers: of the cluster.
        asked_to_stop: looked at all the time.

    Raises:
        Stopped: the user asked to. Runs under way are discarded.
        Lost: the scheduler is gone.
        OSError: a file cannot be written; runs that are done stay.
    """
    jobs = Jobs(plan, workers)
    try:
        jobs.make(asked_to_stop)
    finally:
        jobs.close()


@dataclass
class Jobs:
    """The jobs of a study, and their messages."""

    plan: Plan
    workers: Workers
    _jobs: list[Job] = field(default_factory=list)
    _kills: Counter[Path] = field(default_factory=Counter)
    _waits_since: float = field(default_factory=time.monotonic)

    @property
    def _bar(self) -> StudyProgress:
        return self.workers.bar

    @property
    def _client(self) -> "Client":
        return self.workers.client

    def make(self, asked_to_stop: Callable[[], int]) -> None:
        """Makes all runs; the errors are those of `make`."""
        topic = self.workers.terms.study
        # Called in another thread.
        self._client.subscribe_topic(
            topic, lambda event: self.workers.inbox.put(event[1])
        )
        while not self.plan.is_over:
            if asked_to_stop():
                raise Stopped
            if line := self.workers.view.lost:
                raise Lost(line)
            self._look()
            now = time.monotonic()
            for job in self._jobs:
                if job.run is None and now >= job.rests_until:
                    self._begin(job)
            with suppress(queue.Empty):
                self._take(self.workers.inbox.get(timeout=TICK))
                while True:
                    self._take(self.workers.inbox.get_nowait())

    def close(self) -> None:
        """Ends all processes of the study, on all workers."""
        self.workers.roster.close()
        self.workers.view.close()
        if self._client.status != "running":
            return
        self._client.cancel(
            [job.future for job in self._jobs if job.future], force=True
        )
        study = self.workers.terms.study
        ends = [
            self._client.submit(
                member.dismiss,
                study,
                workers=[address],
                pure=False,
                key=f"end-{i}-{study}",
            )
            for i, address in enumerate(self.workers.asked)
        ]
        deadline = time.monotonic() + FAREWELL
        while not all(end.done() for end in ends) and time.monotonic() < deadline:
            time.sleep(TICK / 2)

    def _look(self) -> None:
        """Looks for lost workers, and makes jobs on those that were let in."""
        for worker in self.workers.look():
            for job in [job for job in self._jobs if job.worker == worker]:
                self._jobs.remove(job)
                self._lose(job, f"the Dask worker {worker} is gone")
        known = {job.worker.address for job in self._jobs}
        for worker in self.workers.accepted.values():
            if worker.address not in known:
                self._jobs += [Job(worker) for _ in range(worker.slots)]
        if self._jobs:
            self._waits_since = time.monotonic()
        elif time.monotonic() - self._waits_since > PATIENCE:
            self._bar.say("no worker to use: waiting for one")
            self._waits_since = math.inf  # said once, until there is one

    def _begin(self, job: Job) -> None:
        """Starts the next run of a job, if there is one."""
        if job.share is not None and not job.share.waiting:
            self._release(job)
        job.share = job.share or self.plan.take()
        if job.share is None:
            return
        run = job.run = job.share.waiting.pop(0)
        job.line, job.began = self._bar.begin(run.name), time.monotonic()
        folder = str(run.folder.absolute()) if job.worker.is_shared else None
        job.future = self._client.submit(
            member.make_run,
            self.workers.terms,
            run.argv,
            run.seed,
            folder,
            workers=[job.worker.address],
            key=f"{run.name}-{secrets.token_hex(4)}",
            pure=False,
            retries=0,
        )
        self.workers.expect(job.future)

    def _take(self, message: Answer | dict[str, Any]) -> None:
        """Takes an event of a run, or the end of a task."""
        if isinstance(message, Answer):
            if message.address:
                return self.workers.introduced(message.address, message.found)
            job = self._of(lambda future: future is message.future)
            if job is not None:  # else it was given up
                self._end(job, message.found)
        else:
            job = self._of(lambda future: future.key == message["key"])
            if job is not None and job.line is not None:
                _show(job.line, message)

    def _of(self, matches: Callable[[Any], bool]) -> Job | None:
        """Returns the job whose task matches."""
        found = (x for x in self._jobs if x.future is not None and matches(x.future))
        return next(found, None)

    def _end(self, job: Job, found: Mapping[str, Any]) -> None:
        """Ends the run of a job."""
        assert job.run and job.share and job.line
        if "made" in found:
            if found["files"] is not None:
                _write(job.run.folder, found["files"])
            elif not _is_seen(job.run.folder):
                return self._fail(job, "its files are not to be seen in the folder")
            job.line.end(found["made"])
            self.plan.ended(job.share, time.monotonic() - job.began)
            self._free(job)
        elif "disk" in found and job.worker.is_shared:
            raise OSError(found["disk"])
        elif line := found.get("failed") or found.get("disk"):
            self._fail(job, line, found["is_request"])
        elif found.get("killed"):
            self._lose(job, found["line"])
        else:
            # Its worker retires, or its process was idle for too long: nobody's fault.
            job.rests_until = time.monotonic() + REST
            self._lose(job, found.get("line", "its worker has given it up"), blame=0)

    def _fail(self, job: Job, text: str, is_request: bool = False) -> None:
        """Ends a run that could not be made; the study goes on."""
        assert job.run and job.share and job.line
        job.line.fail(text)
        failure = Failure(job.run, text, is_request)
        self.plan.ended(job.share, failure=failure)
        self._free(job)

    def _lose(self, job: Job, why: str, blame: int = 1) -> None:
        """Gives the run of a job to another one, unless it is poisonous."""
        if job.run is None or job.share is None or job.line is None:
            return self._release(job)
        # Else it would begin again should the worker come back.
        self._client.cancel([job.future], force=True)
        self._kills[job.run.folder] += blame
        if self._kills[job.run.folder] >= MOST_KILLS:
            self._fail(job, f"given up after {MOST_KILLS} times: {why}")
            return self._release(job)
        self._bar.say(f"{job.run.name}: {why}; it begins anew")
        job.line.drop()
        self.plan.give_back(job.share, job.run)
        job.share = None
        self._free(job)

    def _release(self, job: Job) -> None:
        """Takes its share from a job without a run."""
        if job.share is not None:
            self.plan.release(job.share)
        job.share = None

    def _free(self, job: Job) -> None:
        """Makes a job ready for its next run."""
        job.run = job.line = job.future = None


def _show(line: RunLine, message: Mapping[str, Any]) -> None:
    """Shows an event of a run."""
    if "begin" in message:
        line.begin(message["begin"])
    elif "step" in message:
        line.step(message["step"], message["loss"])
    else:
        line.note(message["note"])


def _is_seen(folder: Path) -> bool:
    """Whether a run that another machine has made is here, at last."""
    deadline = time.monotonic() + SEEING
    while not is_done(folder) and time.monotonic() < deadline:
        # On NFS a file that was looked for in vain stays so for a while.
        os.listdir(folder.parent)
        time.sleep(TICK)
    return is_done(folder)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files of a run that was made without the study's folder."""
    with unfinished(folder) as place:
        place.mkdir(parents=True)
        for name, content in files.items():
            records.write(place / name, content)
