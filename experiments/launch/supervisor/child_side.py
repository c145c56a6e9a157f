"""The child's side of a supervised process: reports its phase and signs of life."""

import json
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

from experiments.exit_codes import TERMINATED

VARIABLE = "SYNCALGOS_CHILD"
BEAT = 0.5  # seconds between signs of life
LONGEST_TEXT = 2000  # characters of a message
INSISTING = 1.0  # seconds to keep trying to send an important message
LINGERING = 5  # seconds; the supervisor needs one or less to end the others


class ChildSide:
    """A process of a run, connected to the supervisor that started it.

    Attributes:
        process: its number, from 0.
        processes: the number of processes.
        local: its number among those on its host, from 0.
        locals: the number of processes on its host.
        hosts: the number of hosts.
        attempt: restarts so far.
        jax_coordinator: host:port for jax's own coordination service.
        init_timeout: seconds that jax may take to connect.
        announced: the values that process 0's command sends to all.
    """

    process: int
    processes: int
    local: int
    locals: int
    hosts: int
    attempt: int
    jax_coordinator: str
    init_timeout: float
    announced: dict[str, Any]

    def __init__(
        self,
        reports: int,
        life: int,
        attributes: dict[str, Any],
        lease: float | None = None,
    ):
        """Starts the threads that give signs of life and watch the supervisor.

        Args:
            reports: the pipe that the supervisor reads.
            life: a pipe that closes when the supervisor is gone.
            attributes: values of the attributes above, by name.
            lease: seconds after which a silent supervisor counts as gone; None for no
                limit.
        """
        vars(self).update(attributes)
        self._reports = reports
        self._last: dict[str, Any] = {}
        # Reentrant: a signal handler may report while this thread is reporting.
        self._lock = threading.RLock()
        for end in (reports, life):
            # Processes that this one starts must not keep the pipes open.
            os.set_inheritable(end, False)
        # A stopped supervisor must not block training.
        os.set_blocking(reports, False)
        threading.Thread(target=self._beat, daemon=True).start()
        threading.Thread(target=_end_with, args=(life, lease), daemon=True).start()

    def report(self, phase: str, step: int | None = None) -> None:
        """Reports the phase of this process; thread-safe and quick.

        Args:
            phase: connect, prepare, train, evaluate or save. From prepare on,
                the process itself handles the signals that stop it.
            step: local steps done.
        """
        with self._lock:
            self._last = {"phase": phase, "step": None if step is None else int(step)}
            self._write(self._last)

    def log(self, text: str) -> None:
        """Sends a line for the supervisor to print."""
        self._write({"note": text[:LONGEST_TEXT]}, INSISTING)

    def decided(self, code: int) -> None:
        """Announces the exit code of the run; no later signal changes it."""
        self._write({"decided": code}, INSISTING)

    def stopped(self) -> None:
        """Announces that this process ends on request, with code 75 or 130."""
        self._write({"said": "stopped"}, INSISTING)

    def refuse(self, text: str, code: int) -> NoReturn:
        """Ends this process, and thereby the run.

        Args:
            text: the reason, in one line; the same reason from all is printed once.
            code: the exit code of the run, such as 2 or 4.
        """
        cut = text[:LONGEST_TEXT]
        self._write({"said": "refused", "text": cut, "code": code}, INSISTING)
        if self.process == 0:
            # jax's service ends with process 0, and then the others abort noisily.
            time.sleep(LINGERING)
        self.leave(code)

    def lost(self, text: str) -> NoReturn:
        """Ends this process at once, with code 75, because another process is gone.

        Args:
            text: the error; shown if no lost process is found.
        """
        self._write({"said": "lost", "text": text[:LONGEST_TEXT]}, INSISTING)
        self.leave(TERMINATED)

    def leave(self, code: int) -> NoReturn:
        """Ends this process without jax's shutdown, which would wait for others."""
        # Avoids Python's own shutdown, during which no thread gives signs of life. On a
        # loaded machine it took seconds, and the supervisor reported a silent process.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    def _beat(self) -> None:
        while True:
            # Repeats the last report: the pipe may have been full before.
            self._write(self._last)
            time.sleep(BEAT)

    def _write(self, message: dict[str, Any], patience: float = 0.0) -> None:
        """Writes a line, or as much as the pipe takes within `patience` seconds."""
        rest = json.dumps(message).encode() + b"\n"
        deadline = time.monotonic() + patience
        # An error means that the supervisor is gone: `_end_with` ends this process.
        with self._lock, suppress(OSError):
            while (
                rest and select.select([], [self._reports], [], max(0.0, patience))[1]
            ):
                rest = rest[os.write(self._reports, rest) :]
                patience = deadline - time.monotonic()


def join_supervisor() -> ChildSide | None:
    """Connects this process to its supervisor; returns None if it has none.

    Call it once, early: from then on the supervisor expects signs of life.
    """
    # Removed, so that processes started by this one do not inherit it.
    given = os.environ.pop(VARIABLE, None)
    return None if given is None else ChildSide(**json.loads(given))


def _end_with(supervisor: int, lease: float | None) -> NoReturn:
    """Ends this process and those it started once the supervisor is gone."""
    # The read returns nothing once the other end is closed, which the system does
    # whatever ends the supervisor. A frozen supervisor is replaced together with its
    # process, so the old process must be gone by then.
    while select.select([supervisor], [], [], lease)[0] and os.read(supervisor, 4096):
        pass
    with suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(TERMINATED)
