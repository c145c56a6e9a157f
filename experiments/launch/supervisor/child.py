"""A process of a run on the side of the supervisor that started it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.launch.child_process import ChildProcess
from experiments.launch.supervisor.child_side import VARIABLE
from experiments.launch.supervisor.group import Log, Rules
from experiments.launch.supervisor.process_status import ProcessStatus

LONGEST_LOOK = 0.5  # seconds between two looks that count as silence


class Remote(NamedTuple):
    """The surroundings of a process whose command is on another machine.

    Attributes:
        folder: its working folder.
        out: takes a line of process 0's stdout.
        lease: seconds without a `poll` after which the process ends itself; None if it
            never does.
        environ: variables of the command, where this machine has no own.
    """

    folder: str
    out: Log
    lease: float | None
    environ: Mapping[str, str] = MappingProxyType({})


class Child:
    """A process of a run: its pipes and its end.

    Attributes:
        status: its last reports, and the system's.
        is_over: whether it has ended, and all that it wrote was read.
    """

    def __init__(
        self,
        command: list[str],
        attributes: dict[str, Any],
        is_prefixed: bool,
        log: Log,
        remote: Remote | None = None,
    ):
        """Starts the process.

        Args:
            command: its argv.
            attributes: of its `ChildSide`.
            is_prefixed: print its stderr behind its number, instead of sharing ours.
            log: prints a line.
            remote: None if its command is the one that calls this.
        """
        number = attributes["process"]
        shared = None if remote is None else subprocess.PIPE
        read_end, reports = os.pipe()
        life, self._life = os.pipe()
        os.set_blocking(self._life, False)
        given = {"reports": reports, "life": life, "attributes": attributes}
        environ = dict(os.environ)
        if remote is not None:
            given["lease"] = remote.lease
            environ = {**remote.environ, **environ, "PYTHONPATH": search_path()}
        environ[VARIABLE] = json.dumps(given)
        self._process = ChildProcess(
            command,
            cwd=None if remote is None else remote.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            # The summary is process 0's alone.
            stdout=shared if number == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if is_prefixed else shared,
            pass_fds=(reports, life),
        )
        self._process.read("reports", os.fdopen(read_end, "rb"))
        os.close(reports)
        os.close(life)
        self.status = ProcessStatus(number, self._process.pid)
        self.is_over = False
        self._log = log
        self._remote = remote
        self._show = log if remote is None else remote.out
        # Whose line it is: the processes share one terminal.
        self._prefix = f"[{number}] " if is_prefixed else ""
        self._renewed = 0.0  # the time at which its lease was
        self._polled: float | None = None
        self._quiet = 0.0  # seconds since its last report
        self._has_joined = False

    def poll(self, now: float, rules: Rules) -> None:
        """Finds whether the process ended, or gives no sign of life."""
        if self.is_over:
            return
        # Not by the clock: after a pause of the supervisor, reports wait in the pipe.
        passed = 0.0 if self._polled is None else now - self._polled
        self._quiet, self._polled = self._quiet + min(passed, LONGEST_LOOK), now
        self._take(self._process.lines())
        if self._process.code is not None:
            self._finish()
            return
        self._renew(now)
        # Python may start slowly, as from a network's file system.
        limit = rules.loss if self._has_joined else max(rules.loss, rules.init_timeout)
        mute = self.status.mute or self._quiet > limit
        silent = self._has_joined and self._quiet > rules.silence
        halted = (silent or mute) and (self.status.halted or is_halted(self.status.pid))
        if mute and not self.status.mute:
            self._process.kill()
        self.status = self.status._replace(silent=silent, halted=halted, mute=mute)

    def signal(self, number: int) -> None:
        """Passes a signal on to the process alone, not to those that it started."""
        if not self.is_over:
            self._process.signal(number)

    def kill(self) -> None:
        """Kills the process and all that it started; `reap` follows."""
        if not self.is_over:
            self._process.kill()

    def reap(self) -> None:
        """Waits for the end of the killed process."""
        if not self.is_over:
            self._process.reap()
            self._finish()

    def _finish(self) -> None:
        # Processes that it started end with it.
        self._process.kill()
        self._take(self._process.last_lines())
        os.close(self._life)
        self.is_over = True
        # The announced code goes first: process 0 lingers, and is killed for it.
        announced = self.status.code
        code = self._process.code if announced is None else announced
        self.status = self.status._replace(code=code, silent=False)

    def _take(self, lines: Iterable[tuple[str, bytes]]) -> None:
        for name, line in lines:
            if name == "reports":
                self._take_report(_decoded(line))
                continue
            text = line.decode(errors="replace")
            if name == "stdout":
                self._show(text)
            else:
                self._log(f"{self._prefix}{text}")

    def _take_report(self, message: dict[str, Any]) -> None:
        self._quiet, self._has_joined = 0.0, True
        if "note" in message:
            number = self.status.process
            prefix = f"process {number}: " if number else ""
            self._log(f"{prefix}{message['note']}")
        else:
            self.status = self.status._replace(**message)

    def _renew(self, now: float) -> None:
        """Renews the lease of a remote command's process, once a second."""
        if self._remote is not None and now - self._renewed >= 1:
            self._renewed = now
            with suppress(OSError):  # it has ended, or is stopped for a long time
                os.write(self._life, b".")


def search_path() -> str:
    """Returns a PYTHONPATH by which a process finds the modules that this one does.

    Paths are absolute, as its working folder may be another one.
    """
    return os.pathsep.join(map(os.path.abspath, sys.path))


def is_halted(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False where that is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The state follows the name, which is in brackets and may hold any character.
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _decoded(line: bytes) -> dict[str, Any]:
    """Returns the message of a line; an empty one if it holds none."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
