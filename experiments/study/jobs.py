"""Makes the missing runs of a study by jobs: a Dask task for each run.

A Dask worker executes one run at a time, in its own process. It must see the study's
folder: the run's files appear there, and the task returns only how the run ended.
"""

import importlib.util
import logging
import math
import operator
import os
import pickle
import pkgutil
import queue
import random
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from experiments import files
from experiments.checkpoint import lock
from experiments.command import stopping
from experiments.command.errors import BadRequest, MayPass, in_one_line
from experiments.command.overlapping import Overlapping
from experiments.command.stopping import UNCONNECTED
from experiments.processes import certificates
from experiments.study import making, worker
from experiments.study.config import StudyConfig
from experiments.study.making import (
    FinishedRun,
    Missing,
    Refused,
    StudyProgress,
    StudyQueue,
)
from experiments.study.own_workers import LOCALHOST, OwnWorkers
from experiments.study.runs import is_done
from experiments.training.config import RunConfig
from experiments.training.machine import environment, threads

if TYPE_CHECKING:
    from distributed import Client, Future


# Seconds.
TICK = 0.05  # between two looks at the workers
SCHEDULER_LOST_AFTER = 60.0  # without an answer to any of `QUESTIONS`
SILENCE = 60.0  # without a step or a worker, until the user is told
YEAR = 365 * 86400.0
SEEING = 60.0  # until files from another machine must be visible

QUESTIONS = 3  # to a scheduler before it is lost
LOGGERS = "distributed", "tornado", "bokeh"  # those whose names begin so
MOST_LOSSES = 3  # how often a run's worker may be lost before the run is given up
SETTINGS = "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"


@dataclass(eq=False)
class StudyJob:
    """A run that a worker makes.

    Attributes:
        run: the run.
        future: its Dask task.
        step_time: the time of its last step.
    """

    run: Missing
    future: "Future"
    step_time: float = field(default_factory=time.monotonic)


def make_by_jobs(
    config: StudyConfig, bar: StudyProgress, asked_to_stop: stopping.ReadSignal
) -> None:
    """Makes all runs of a plan on a cluster.

    Args:
        config: the config of the study.
        bar: the display of the runs, with their plan.
        asked_to_stop: function that is polled all the time.

    Raises:
        BadRequest: the workers of this command's own cluster are unfit.
        StopRequested: the user asked to stop. Runs in progress are discarded.
        MayPass: the scheduler or all workers of this command's own cluster are gone.
            Completed runs are kept.
        OSError: a file cannot be written. Completed runs are kept.
        Unreachable: no scheduler answers.
    """
    plan = bar.plan
    with cluster(config.scheduler, min(config.jobs, plan.missing)) as dask:
        if _has_dashboard():
            bar.say(f"dashboard: {dask.client.dashboard_link}")
        jobs = StudyJobs(dask, _order(config, plan), bar)
        while not plan.is_over:
            if asked_to_stop():
                raise making.StopRequested
            jobs.step()
            time.sleep(TICK)


def _has_dashboard() -> bool:
    """Whether Dask can show its pages, which bokeh draws."""
    return importlib.util.find_spec("bokeh") is not None


def job_environment(devices: int | None) -> dict[str, str]:
    """Returns environment variables of the jobs' processes: devices and threads.

    They match this process, so that jobs give the same bits wherever they run.
    """
    if devices is not None:
        return environment(devices, devices)
    if jax.default_backend() != "cpu":
        return {}
    return environment(jax.local_device_count(), threads())


def _order(config: StudyConfig, plan: StudyQueue) -> worker.Order:
    """Returns what all tasks have in common."""
    environ = job_environment(config.devices_per_job)
    environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    folder = config.folder.absolute()
    run_set = plan.planned[0]
    return {
        "folder": str(folder),
        "holder": (folder / lock.NAME).read_text(),
        "topic": secrets.token_hex(8),
        "directory": os.getcwd(),
        "environ": environ,
        "settings": {name: getattr(jax.config, name) for name in SETTINGS},
        "factories": config.factories,
        "facts": worker.facts(config.factories, environ),
        "first": _list_fields(run_set.make_config(run_set.seeds[0])),
        "objects": pickle.dumps(run_set.variant.objects),
    }


def _list_fields(config: RunConfig) -> dict[str, Any]:
    """Returns the fields of a config, which a task must not name: see `_submit`."""
    fields: dict[str, Any] = {}
    for name, value in vars(config).items():
        fields[name] = dict(value) if isinstance(value, Mapping) else value
    return fields


class Cluster(NamedTuple):
    """A scheduler with its workers.

    Attributes:
        client: the client of the scheduler.
        own_workers: those that this command has started; None for a running scheduler.
    """

    client: "Client"
    own_workers: OwnWorkers | None = None


class StudyJobs:
    """The runs that the workers of a cluster make.

    Args:
        dask: the cluster.
        order: what all tasks have in common.
        bar: the display of the runs, with their plan.
    """

    def __init__(self, dask: Cluster, order: worker.Order, bar: StudyProgress):
        client = dask.client
        self._client: Any = client  # its types know only its asynchronous calls
        self._own_workers = dask.own_workers
        self._order = order
        self._plan = bar.plan
        self._bar = bar
        self._checks = dict[str, Any]()  # futures, by the address of their worker
        self._last_numbers = dict[str, int]()  # of each worker's last run
        self._jobs = dict[str, StudyJob]()  # by the address of their worker
        self._losses = Counter[Path]()
        self._idle_since = time.monotonic()
        self._inbox = queue.SimpleQueue[tuple[float, Any]]()
        # Called in another thread.
        client.subscribe_topic(order["topic"], self._inbox.put)

    def step(self) -> None:
        """Handles what has happened, and gives runs to free workers."""
        fit = self._fit(self._present())
        if self._own_workers is not None:
            self._own_workers.look(fit, self._bar.say)
        self._listen()
        for address, job in [*self._jobs.items()]:
            if job.future.done() or address not in fit:
                self._end(address, self._jobs.pop(address))
        for address in sorted(fit - self._jobs.keys()):
            run = self._plan.take(self._last_numbers.get(address))
            if run:
                self._begin(address, run)
        self._tell_silence()

    def _present(self) -> set[str]:
        """Returns the addresses of all workers; a MayPass without an answer."""
        # Several times: an answer is missed while this command itself is stopped.
        for _ in range(QUESTIONS):
            with suppress(OSError):
                return self._ask()
        raise MayPass(
            "the Dask scheduler is lost: completed runs are kept; the same command "
            "continues from them"
        )

    def _ask(self) -> set[str]:
        """Returns the addresses of all workers; an OSError without an answer."""
        client = self._client
        if client.status != "running":
            raise ConnectionError
        seconds = SCHEDULER_LOST_AFTER / QUESTIONS
        return {*client.sync(client.scheduler.ncores, callback_timeout=seconds)}

    def _fit(self, present: set[str]) -> set[str]:
        """Has new workers check themselves; returns those that can make runs."""
        # A worker may come back at its address, with other code.
        checks: dict[str, Any] = {}
        for address in present:
            check = self._checks.get(address)
            checks[address] = check or self._submit(address, worker.check_worker)
        self._checks = checks
        fit: set[str] = set()
        for address, check in checks.items():
            if check.status == "finished":
                fit.add(address)
            if check.status != "error":
                continue
            line = making.describe_error(check.exception()).line
            if self._client.cluster is not None:  # no other worker will come
                raise BadRequest(line)
            self._bar.say_once(f"the Dask worker {address} is refused: {line}")
        return fit

    def _submit(self, address: str, function: Callable, *arguments: Any) -> Any:
        """Starts a task that calls a function of `worker` on a worker."""
        place = {"workers": [address], "pure": False}
        # A worker ends if it cannot import what a task names. So tasks name only the
        # standard library, which then imports our code, or raises an error.
        name = f"{function.__module__}:{function.__name__}"
        resolved = self._client.submit(pkgutil.resolve_name, name, **place)
        return self._client.submit(
            operator.call, resolved, self._order, *arguments, **place
        )

    def _begin(self, address: str, run: Missing) -> None:
        """Has a worker execute a run."""
        objects = pickle.dumps(run.runs.variant.objects)
        future = self._submit(
            address,
            worker.make_run,
            run.number,
            _list_fields(run.config),
            str(run.folder.absolute()),
            objects,
        )
        self._jobs[address] = StudyJob(run, future)
        self._bar.begin(run)
        self._last_numbers[address] = run.number

    def _listen(self) -> None:
        """Shows the steps that the workers have told."""
        jobs = {job.future.key: job for job in self._jobs.values()}
        while not self._inbox.empty():
            _, (key, news) = self._inbox.get()
            job = jobs.get(key)
            if job:
                job.step_time = time.monotonic()
                self._bar.show(job.run, news)

    def _end(self, address: str, job: StudyJob) -> None:
        """Counts a run that has ended, or takes it back if its worker is lost."""
        outcome = _outcome(job)
        if outcome is None:
            self._losses[job.run.folder] += 1
            if self._losses[job.run.folder] == MOST_LOSSES:
                outcome = Refused(
                    f"given up after {MOST_LOSSES} times: the Dask worker {address} is "
                    "gone"
                )
        if outcome is not None:
            return self._bar.end(job.run, outcome)
        self._bar.drop(job.run)
        self._bar.say(
            f"{job.run.name}: the Dask worker {address} is gone; the run starts again"
        )
        self._plan.give_back(job.run)

    def _tell_silence(self) -> None:
        """Names runs that take no step, and tells that there is no worker."""
        current_time = time.monotonic()
        for address, job in self._jobs.items():
            if current_time - job.step_time > SILENCE:
                job.step_time = math.inf  # said once, until its next step
                self._bar.say(
                    f"{job.run.name}: no step for {SILENCE:g} s on the Dask worker "
                    f"{address}: it compiles, is busy or hangs"
                )
        if self._jobs:
            self._idle_since = current_time
        elif current_time - self._idle_since > SILENCE:
            self._idle_since = math.inf  # said once, until there is a run
            self._bar.say("no Dask worker is available: waiting for one")


def _outcome(job: StudyJob) -> FinishedRun | Refused | None:
    """Returns how a run ended; None if its worker is lost."""
    if not job.future.done():
        return None
    try:
        outcome = job.future.result(ANSWER)
    except (making.StopRequested, TimeoutError):  # the worker ends, or has just done so
        return None
    except OSError:  # a full disk would stop all others, too
        raise
    except Exception as error:
        return making.describe_error(error)
    if isinstance(outcome, FinishedRun) and not _is_seen(job.run.folder):
        return Refused(
            "its files do not appear in the study's folder: workers must see it at "
            "the same path"
        )
    return outcome


def _is_seen(folder: Path) -> bool:
    """Waits for the files of a run from another machine; returns whether they came."""
    deadline = time.monotonic() + SEEING
    while not is_done(folder) and time.monotonic() < deadline:
        # NFS remembers for a while that a file was missing; listing refreshes it.
        os.listdir(folder.parent)
        time.sleep(TICK)
    return is_done(folder)


TLS = "DASK_DISTRIBUTED__COMM__TLS__"
CERTIFICATES = f"{TLS}CA_FILE, …__CLIENT__CERT and …__CLIENT__KEY"
ANSWER = 30.0  # seconds for a scheduler to answer


class Unreachable(BadRequest):
    """No scheduler answers; the message is one line for the user."""

    code = UNCONNECTED


def reach(scheduler: str, seconds: float) -> None:
    """Tests the connection to a running scheduler.

    For tls://, Dask's own settings name the certificates, which are checked first:
    `CERTIFICATES`.

    Args:
        scheduler: tcp://HOST:PORT, tls://HOST:PORT or a scheduler file.
        seconds: seconds to wait for the answer.

    Raises:
        BadRequest: the text is invalid, or a certificate cannot be used.
        Unreachable: no scheduler answers there.
    """
    with dask_silenced, _reaching(scheduler) as address:
        from distributed import Security
        from distributed.comm.core import connect
        from distributed.utils import LoopRunner

        async def knock() -> None:
            arguments = Security().get_connection_args("client")
            await (await connect(address, timeout=seconds, **arguments)).close()

        if address.startswith("tls://"):
            _check_certificates()
        # A client that fails to connect delays the interpreter's exit for seconds. The
        # event loop is in a thread of its own: in a notebook, this thread runs one.
        LoopRunner().run_sync(knock)


@contextmanager
def _reaching(scheduler: str) -> Iterator[str]:
    """Yields the address of a scheduler; raises Dask's errors as errors of one line."""
    from distributed.comm.core import FatalCommClosedError

    try:
        yield _address(scheduler)
    except FatalCommClosedError as error:  # by TLS alone
        raise BadRequest(
            f"--scheduler {scheduler}: it and this command do not trust each other's "
            f"certificates: set {CERTIFICATES} to files of its authority"
        ) from error
    except OSError as error:
        raise Unreachable(
            f"--scheduler {scheduler}: no answer: {in_one_line(error)}"
        ) from error
    # Dask raises these for an invalid address, for missing certificates, or for a
    # scheduler with another version of Python or Dask.
    except (ValueError, TypeError, ImportError) as error:
        reason = in_one_line(error)
        if "ssl" in reason:
            raise BadRequest(
                f"--scheduler {scheduler}: tls:// needs certificates: set "
                f"{CERTIFICATES}"
            ) from error
        raise BadRequest(f"--scheduler {scheduler}: {reason}") from error


def _check_certificates() -> None:
    """Raises a BadRequest for certificates that Dask cannot use."""
    from distributed import Security

    security = Security()
    paths = {
        f"{TLS}CLIENT__CERT": security.tls_client_cert,
        f"{TLS}CLIENT__KEY": security.tls_client_key,
        f"{TLS}CA_FILE": security.tls_ca_file,
    }
    # Dask names those that are missing, and takes the text of a file in its place.
    if all(isinstance(path, str) and "\n" not in path for path in paths.values()):
        certificates.check_certificates(paths)


def _address(scheduler: str) -> str:
    """Returns the address of a scheduler, read from a scheduler file if necessary."""
    if "://" in scheduler:
        return scheduler
    with suppress(OSError, files.Damaged):
        address = files.read(Path(scheduler), "address")["address"]
        if isinstance(address, str):
            return address
    raise BadRequest(
        "--scheduler must be tcp://HOST:PORT, tls://HOST:PORT or a scheduler file, got "
        f"{scheduler!r}"
    )


@contextmanager
def cluster(scheduler: str | None, jobs: int) -> Iterator[Cluster]:
    """Yields a running cluster, or one of this command.

    Args:
        scheduler: the address or file of a scheduler; None starts one here.
        jobs: the number of workers to start for it, at 127.0.0.1.

    Raises:
        BadRequest: the address is invalid.
        Unreachable: no scheduler answers.
    """
    with dask_silenced:
        if scheduler is not None:
            yield from _running_cluster(scheduler)
        else:
            yield from _open_own_cluster(jobs)


def _running_cluster(scheduler: str) -> Iterator[Cluster]:
    """Yields the cluster of a running scheduler."""
    from distributed import Client

    with _reaching(scheduler) as address:
        client = Client(address, timeout=ANSWER, set_as_default=False)
    with client:
        yield Cluster(client)


def _open_own_cluster(jobs: int) -> Iterator[Cluster]:
    """Yields a cluster of this command."""
    from distributed import Client, LocalCluster

    local_cluster: Any = LocalCluster(
        n_workers=0,
        host=LOCALHOST,
        dashboard_address=f"{LOCALHOST}:0",
        # `OwnWorkers` notices workers that are silent. Dask would take them all for
        # silent once this command, which holds the scheduler, was stopped for a while.
        # Without bokeh, Dask tries to import its pages in each scheduler. Of two that
        # start at once in threads, one would then find them half imported.
        scheduler_kwargs={"worker_ttl": YEAR, "dashboard": _has_dashboard()},
        silence_logs=False,  # `dask_silenced` does it, for overlapping calls too
    )
    # The workers end before their scratch folder goes, and the scheduler.
    with (
        local_cluster,
        TemporaryDirectory() as scratch,
        closing(OwnWorkers(local_cluster.scheduler, scratch)) as workers,
        Client(local_cluster, set_as_default=False) as client,
    ):
        for _ in range(jobs):
            workers.start()
        yield Cluster(client, workers)


class _LogState(NamedTuple):
    """What Dask's import and its schedulers change of a logger."""

    level: int
    propagates: bool
    handlers: list[logging.Handler]


def _log_states() -> dict[logging.Logger, _LogState]:
    """Returns the states of all loggers of Dask and of what it uses."""
    states = {}
    for name, logger in [*logging.root.manager.loggerDict.items()]:
        is_logger = isinstance(logger, logging.Logger)  # or else a place for one
        if is_logger and name.partition(".")[0] in LOGGERS:
            handlers = [*logger.handlers]
            states[logger] = _LogState(logger.level, logger.propagate, handlers)
    return states


@Overlapping
@contextmanager
def dask_silenced() -> Iterator[None]:
    """Silences Dask's log; the important events are reported in one line instead.

    Loggers are as before in the end, or, if they are new, as Dask's import makes them.
    """
    random_state = random.getstate()  # Dask draws, but the generator is the user's
    log_states = _log_states()
    # Imported first, because the import sets the levels of its loggers.
    from distributed.versions import VersionMismatchWarning

    # By one thread alone: schedulers that start in two would import it at once, and one
    # of them then finds it without its parts.
    with suppress(ImportError):  # without bokeh, there are no pages
        import distributed.dashboard.scheduler  # noqa: F401

    log_states = _log_states() | log_states
    with warnings.catch_warnings():
        # The warning is a table; we refuse workers that differ by name instead.
        warnings.simplefilter("ignore", VersionMismatchWarning)
        for logger in log_states:
            logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for logger, state in log_states.items():
                logger.setLevel(state.level)
                logger.propagate = state.propagates
                logger.handlers[:] = state.handlers
            random.setstate(random_state)
