"""Runs of a study on a Dask worker: each job has a child process there.

These functions run in the threads of a Dask worker.
"""

import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from experiments.launch.cluster.member import is_wanted
from experiments.launch.supervisor.child import is_halted, search_path
from experiments.launch.supervisor.group import Rules
from experiments.launch.supervisor.json_lines import decode, encode
from experiments.launch.supervisor.process_status import signal_name

TICK = 0.1  # seconds between two looks at whether a run is still wanted
REAPING = 5.0  # seconds for a killed process to go
START = Rules().init_timeout  # seconds for Python to start
LOSS = Rules().loss  # seconds without a sign of life before a process counts as lost
STUCK = 600.0  # seconds without a step before the user hears of it


class Terms(NamedTuple):
    """The terms on which a study's jobs run, the same for all of them.

    Attributes:
        study: random name of this command: the topic of its events.
        directory: from which relative paths of flags count, where it exists.
        own: digests of the user's own modules, by name.
        environment: variables of the child processes: devices and threads.
    """

    study: str
    directory: str
    own: Mapping[str, str]
    environment: Mapping[str, str]


class Child:
    """A child process that makes runs, one at a time."""

    def __init__(self, terms: Terms):
        here = terms.directory if Path(terms.directory).is_dir() else None
        self._process = subprocess.Popen(
            # -P: a user's own module is the one that the worker has found.
            [sys.executable, "-P", "-m", "experiments.study.running.child"],
            cwd=here,
            env={
                **os.environ,
                **terms.environment,
                "PYTHONPATH": search_path(),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C reaches the study's command alone; one kill reaches all.
            start_new_session=True,
        )
        self._patience = START  # until its first sign of life
        self._is_mute = False
        self._heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        for stream, take in (
            (self._process.stdout, decode),
            (
                self._process.stderr,
                lambda line: {"said": line.decode(errors="replace")},
            ),
        ):
            threading.Thread(
                target=self._read, args=(stream, take), daemon=True
            ).start()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, and gives signs of life."""
        return not self._is_mute and self._process.poll() is None

    def ask(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
        """Sends a request, and yields its answers; None where there is no news.

        The last one is {"ended": exit code} if the process ends, {"mute": in words} if
        it was killed for its silence.
        """
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: its pipes say how
            self._process.stdin.write(encode(dict(request)))
            self._process.stdin.flush()
        open_pipes, quiet, moved = 2, 0.0, time.monotonic()
        while open_pipes:
            try:
                answer = self._heard.get(timeout=TICK)
            except queue.Empty:
                # Not by the clock: after a pause of this process, signs of life wait.
                quiet += TICK
                if quiet > self._patience:
                    yield {"mute": self._silenced()}
                    return
                # What it has started may outlive it, and hold its pipes.
                if not self.is_alive:
                    self.kill()
                # Such as by a dead mount, or a deadlock; some compile for that long.
                is_stuck = time.monotonic() - moved > STUCK
                moved = math.inf if is_stuck else moved
                yield {"note": self._stuck()} if is_stuck else None
                continue
            quiet = 0.0
            if answer is None:
                open_pipes -= 1
            elif answer:
                moved = time.monotonic()
                yield answer
            else:
                self._patience = LOSS
        yield {"ended": self._process.wait()}

    def kill(self) -> None:
        """Kills the process, and all that it started."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAPING)

    def _stuck(self) -> str:
        """Returns in words that the process lives, and gets nowhere."""
        pid = self._process.pid
        return f"its process (pid {pid}) lives, but has taken no step for {STUCK:g} s"

    def _silenced(self) -> str:
        """Kills the process, and returns in words that it gave no sign of life."""
        pid, seconds = self._process.pid, self._patience
        why = " (it was stopped)" if is_halted(pid) else ""
        self._is_mute = True  # a driver, or a dead mount, may hold it for ever
        self.kill()
        return f"its process (pid {pid}) gave no sign of life for {seconds:g} s{why}"

    def _read(self, stream: IO[bytes], take: Any) -> None:
        """Passes lines on to the thread that asks."""
        for line in stream:
            if (answer := take(line.rstrip(b"\n"))) is not None:
                self._heard.put(answer)
        self._heard.put(None)


class Pool:
    """The child processes of this Dask worker, by the terms of their study."""

    def __init__(self):
        self._lock = threading.Lock()
        self._idle: dict[str, list[Child]] = {}
        self._busy: dict[str, list[Child]] = {}

    def take(self, terms: Terms) -> Child:
        """Returns an idle child process, or a new one."""
        with self._lock:
            # Those that have waited for long have ended by themselves.
            for study, idle in self._idle.items():
                self._idle[study] = [child for child in idle if child.is_alive]
            idle = self._idle.setdefault(terms.study, [])
            child = idle.pop() if idle else Child(terms)
            self._busy.setdefault(terms.study, []).append(child)
            return child

    def give_back(self, terms: Terms, child: Child) -> None:
        """Keeps a child process for the next run, if it lives."""
        with self._lock:
            self._busy[terms.study].remove(child)
            if child.is_alive:
                self._idle.setdefault(terms.study, []).append(child)

    def dismiss(self, study: str) -> None:
        """Ends all child processes of a study."""
        with self._lock:
            gone = [*self._idle.pop(study, []), *self._busy.get(study, [])]
        for child in gone:
            child.kill()


_POOL = Pool()


def introduce(terms: Terms, argv: Sequence[str], seed: int) -> dict[str, Any]:
    """Has a worker load a run's data, before it gets work.

    Args:
        terms: of the study.
        argv: flags of the run.
        seed: of the run.

    Returns:
        devices and settings (in words), or failed, disk or killed, with a line; {} if
        nobody wants it any more.
    """
    return _asked(terms, {"argv": list(argv), "seed": seed, "own": dict(terms.own)})


def make_run(
    terms: Terms, argv: Sequence[str], seed: int, folder: str | None
) -> dict[str, Any]:
    """Makes a run in a child process, and reports its steps as events.

    Args:
        terms: of the study.
        argv: flags of experiments.run, without --seed.
        seed: of the run.
        folder: of its files; None returns them.

    Returns:
        made (results in words) and files (contents by name, or None); or failed or disk
        (a line); or killed (whether the run is to blame) and line (how its process
        ended); {} if nobody wants it any more.
    """
    with nullcontext(None) if folder else tempfile.TemporaryDirectory() as own:
        target = Path(folder or Path(own or "", "run"))
        request = {"argv": list(argv), "seed": seed, "own": dict(terms.own)}
        request["folder"] = str(target)
        found = _asked(terms, request)
        if "made" not in found:
            return found
        files = None if folder else {x.name: x.read_bytes() for x in target.iterdir()}
        return {**found, "files": files}


def dismiss(study: str) -> None:
    """Ends the child processes of a study on this worker."""
    _POOL.dismiss(study)


def _asked(terms: Terms, request: Mapping[str, Any]) -> dict[str, Any]:
    """Asks a child process; returns its last answer, {} if nobody wants it any more."""
    from distributed import get_worker

    worker, child, said = get_worker(), _POOL.take(terms), ""
    key = worker.get_current_task()
    try:
        for answer in child.ask(request):
            # The study's command has stopped, is gone, or has given this worker up.
            if not is_wanted(worker, key):
                child.kill()
                return {}
            if answer is None:
                continue
            if "mute" in answer:
                return {"killed": True, "line": answer["mute"]}
            if "ended" in answer:
                return _ending(answer["ended"], said)
            if answer.keys() & {"made", "failed", "disk", "devices"}:
                return answer
            if "said" in answer:
                said = answer["said"].strip() or said
            else:
                worker.log_event(terms.study, {"key": key, **answer})
        return {}
    finally:
        _POOL.give_back(terms, child)


def _ending(code: int, said: str) -> dict[str, Any]:
    """Returns how a process ended: a line, and whether it was to blame."""
    last = f": {said}" if said else ""
    if code >= 0:
        return {"killed": code > 0, "line": f"its process ended with {code}{last}"}
    line = f"its process was killed by {signal_name(-code)}{last}"
    return {"killed": True, "line": line}
