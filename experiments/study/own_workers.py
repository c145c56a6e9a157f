"""The Dask workers that a command starts here, and replaces when one is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.command import stopping
from experiments.command.errors import BadRequest, MayPass

LOCALHOST = "127.0.0.1"
FLAGS = (
    f"--nthreads 1 --no-nanny --memory-limit 0 --death-timeout 60 --host {LOCALHOST}"
)
FLAGS += f" --dashboard-address {LOCALHOST}:0"

# Seconds until a worker is lost.
STOPPED_FOR = 10.0  # as by SIGSTOP
# A worker that holds Python's lock, as some reads of large files do, is silent, too.
SILENT_FOR = 300.0
MAX_SECONDS_BETWEEN_LOOKS = 1.0  # the most that counts between two looks


@dataclass(eq=False)
class _Worker:
    """A worker that was started here.

    Attributes:
        name: its name in Dask.
        process: its process.
        heartbeat: the time of its last heartbeat; None before the first.
        silent_seconds: the time since then.
        stopped_seconds: the time since a signal stopped its process.
        is_fit: whether it has ever been able to make runs.
    """

    name: str
    process: subprocess.Popen
    heartbeat: float | None = None
    silent_seconds: float = 0.0
    stopped_seconds: float = 0.0
    is_fit: bool = False

    def end(self) -> None:
        """Kills its process, and all that this has started."""
        # Where none is left, macOS says PermissionError.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class OwnWorkers:
    """Workers of a scheduler in this process.

    Args:
        scheduler: Dask's scheduler.
        folder: for the files of the workers.
    """

    def __init__(self, scheduler: Any, folder: str):
        self._scheduler = scheduler
        self._folder = folder
        self._workers = list[_Worker]()
        self._num_started = 0
        self._last_look = time.monotonic()

    def start(self) -> None:
        """Starts one more worker as a user does."""
        # Dask's own settings for the processes of workers: a nanny would set them.
        from dask import config

        settings = config.get("distributed.nanny.pre-spawn-environ")
        environ = {name: str(x) for name, x in settings.items() if x is not None}
        name = f"own-{self._num_started}"
        self._num_started += 1
        folder = Path(self._folder, name)
        address = self._scheduler.address
        command = [sys.executable, "-m", "dask", "worker", address, *FLAGS.split()]
        process = subprocess.Popen(
            [*command, "--name", name, "--local-directory", str(folder)],
            env={**environ, **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this command
        )
        self._workers.append(_Worker(name, process))

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            worker.end()

    def look(self, fit: Collection[str], say: Callable[[str], None]) -> None:
        """Replaces workers that are lost.

        One that was lost before it could make runs is not replaced: the next might be,
        too, for ever.

        Args:
            fit: the addresses of workers that can make runs.
            say: shows the user a line.

        Raises:
            MayPass: none is left, but another attempt may succeed.
            BadRequest: all have ended by themselves before they could make runs.
        """
        current_time = time.monotonic()
        # Time in which this command itself was stopped says nothing of its workers.
        seconds = min(current_time - self._last_look, MAX_SECONDS_BETWEEN_LOOKS)
        self._last_look = current_time
        states = {state.name: state for state in [*self._scheduler.workers.values()]}
        for worker in [*self._workers]:
            state = states.get(worker.name)
            if state is not None and state.last_seen != worker.heartbeat:
                worker.heartbeat = state.last_seen
                worker.silent_seconds = 0.0
            else:
                worker.silent_seconds += seconds
            if state is not None and state.address in fit:
                worker.is_fit = True
            if _is_stopped(worker.process):
                worker.stopped_seconds += seconds
            else:
                worker.stopped_seconds = 0.0
            loss = _loss(worker)
            if loss:
                self._replace(worker, loss, say)

    def _replace(self, worker: _Worker, loss: str, say: Callable[[str], None]) -> None:
        """Ends a lost worker, and starts another if that may help."""
        worker.end()
        self._workers.remove(worker)
        if worker.is_fit:
            say(f"a Dask worker of --jobs {loss}: another one starts")
            self.start()
        elif self._workers:
            say(
                f"a Dask worker of --jobs {loss} before its first run: the study goes "
                f"on with {len(self._workers)}"
            )
        elif worker.process.returncode < 0:
            raise MayPass(
                f"no Dask worker of --jobs is left: the last {loss} before its first "
                "run: completed runs are kept; the same command continues from them, "
                "and fewer --jobs take less memory"
            )
        else:
            raise BadRequest(
                f"no Dask worker of --jobs is left: the last {loss} before its first "
                f"run: run python -m dask worker tcp://{LOCALHOST}:1 --death-timeout 1 "
                "to see why, or leave out --jobs"
            )


def _is_stopped(process: subprocess.Popen) -> bool:
    """Whether a signal has stopped a process."""
    import psutil  # distributed needs it

    try:
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:  # it has ended
        return False


def _loss(worker: _Worker) -> str:
    """Returns how a worker was lost; "" if it was not."""
    code = worker.process.poll()
    if code is not None and code < 0:
        return f"was killed by {stopping.signal_name(-code)}"
    if code is not None:
        return f"ended with code {code}"
    if worker.stopped_seconds > STOPPED_FOR:
        return f"was stopped for {STOPPED_FOR:g} s"
    if worker.silent_seconds > SILENT_FOR:
        return f"was silent for {SILENT_FOR:g} s"
    return ""
