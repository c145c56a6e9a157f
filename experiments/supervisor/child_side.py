"""The side of a process that a supervisor has started: where it is, its last words."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

from experiments.cli.exits import TERMINATED

VARIABLE = "SYNCALGOS_MEMBER"
BEAT = 0.5  # seconds between signs of life
LONGEST_TEXT = 2000  # characters of last words
LINGERING = 5  # seconds, of what the supervisor takes one or less to do


class Member:
    """One process of a run, as its supervisor has started it.

    Attributes:
        process: its number, from 0.
        processes: how many there are.
        local: its number among those on its host, from 0.
        locals: how many run on its host.
        hosts: how many hosts the processes run on.
        attempt: how many restarts there were.
        jax_coordinator: host:port where jax's own coordination service shall run.
        init_timeout: seconds that jax may take to start it.
        announced: what process 0's command tells all.
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

    def __init__(self, told: dict[str, Any]):
        self._reports = told.pop("reports")
        life = told.pop("life")
        for name, value in told.items():
            setattr(self, name, value)
        self._at: dict[str, Any] = {}
        self._rest = b""  # of the line before, for which the pipe had no room
        self._lock = threading.RLock()  # a signal's handler may tell, too
        for end in (self._reports, life):
            os.set_inheritable(end, False)
        os.set_blocking(self._reports, False)
        threading.Thread(target=self._beat, daemon=True).start()
        threading.Thread(target=_end_with, args=(life,), daemon=True).start()

    def tell(self, phase: str, step: int | None = None) -> None:
        """Tells where this process is; thread-safe and quick.

        Args:
            phase: connect, prepare, compile, train, evaluate or save. From prepare on,
                the process handles SIGTERM and SIGINT by itself.
            step: the local steps done.
        """
        with self._lock:
            self._at = {"phase": phase, "step": None if step is None else int(step)}
            self._write(self._at)

    def note(self, text: str) -> None:
        """Has the supervisor print a line."""
        self._insist({"note": text})

    def stopped(self, signal_name: str) -> None:
        """Tells that this process ends because it was asked to, by code 75 or 130."""
        self._insist({"said": "stopped", "text": signal_name})

    def refuse(self, text: str, code: int) -> NoReturn:
        """Ends this process, and so the run.

        Args:
            text: why, in one line; the same from all processes is printed once.
            code: the exit code of all commands, such as 2 or 4.
        """
        self._insist({"said": "refused", "text": text, "code": code})
        if self.process == 0:  # the others abort, not quietly, once jax's service ends
            time.sleep(LINGERING)
        _exit(code)

    def lost(self, text: str) -> NoReturn:
        """Ends this process at once, as another one is gone: code 75.

        Args:
            text: how that was noticed; the user sees it if nobody else is found gone.
        """
        self._insist({"said": "lost", "text": text})
        _exit(TERMINATED)

    def _beat(self) -> None:
        while True:
            with self._lock:
                self._write(self._at)  # which also repeats what found no room
            time.sleep(BEAT)

    def _write(self, message: dict[str, Any]) -> bool:
        """Writes a line, unless one before it still finds no room."""
        with self._lock:
            if not self._flush():
                return False
            self._rest = json.dumps(message).encode() + b"\n"
            self._flush()
            return True

    def _flush(self) -> bool:
        """Whether all is written."""
        with self._lock:
            try:
                while self._rest:
                    self._rest = self._rest[os.write(self._reports, self._rest) :]
            except BlockingIOError:
                return False
            except OSError:  # the supervisor is gone, and this process about to go
                self._rest = b""
            return True

    def _insist(self, message: dict[str, Any]) -> None:
        """Writes what must not be missed, for at most a second."""
        message = {
            name: value[:LONGEST_TEXT] if isinstance(value, str) else value
            for name, value in message.items()
        }
        deadline = time.monotonic() + 1
        taken = False
        while time.monotonic() < deadline:
            taken = taken or self._write(message)
            if taken and self._flush():
                return
            time.sleep(0.01)


def joined() -> Member | None:
    """This process's part in a run; None if no supervisor has started it.

    To be called once, early: from here on the supervisor expects signs of life, and
    processes that this one starts are not members.
    """
    told = os.environ.pop(VARIABLE, None)
    return None if told is None else Member(json.loads(told))


def _exit(code: int) -> NoReturn:
    """Ends without jax's own farewell, which would wait for those that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _end_with(supervisor: int) -> NoReturn:
    """Ends this process and those that it started once the supervisor is gone."""
    while os.read(supervisor, 1):
        pass
    with suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(TERMINATED)
