"""The supervisor's side of a process that it started."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from experiments.launch.supervisor.child_side import VARIABLE
from experiments.launch.supervisor.group import Log
from experiments.launch.supervisor.limits import Limits
from experiments.launch.supervisor.process_status import ProcessStatus

LONGEST_LOOK = 0.5  # seconds; a longer pause between polls counts as this
PIECE = 1 << 16  # bytes; longer lines are split
MOST_LINES = 1000  # lines in the queue; beyond that the process has to wait
LAST_WORDS = 2.0  # seconds to read the rest of pipes; its children may hold them open
REAPING = 5.0  # seconds; a process that a driver holds longer is left to the system


class Remote(NamedTuple):
    """The settings of a process that a command on another machine started.

    Attributes:
        folder: its working folder.
        out: called with each line of process 0's stdout.
        lease: seconds without a `poll` after which the process ends itself; None if it
            never does.
        environ: the command's environment variables; those set on this machine take
            precedence.
    """

    folder: str
    out: Log
    lease: float | None
    environ: Mapping[str, str] = MappingProxyType({})


class Child:
    """A process of a run; threads read its pipes.

    Ctrl-C does not reach the process. Killing it also kills all processes it started.

    Attributes:
        status: the last known state, from the process and from the system.
        is_over: whether the process has ended and all its output was read.
    """

    def __init__(
        self,
        command: list[str],
        attributes: dict[str, Any],
        log: Log,
        remote: Remote | None = None,
    ):
        """Starts the process.

        Args:
            command: the argv of the process.
            attributes: the attributes of its `ChildSide`.
            log: prints a line; lines of processes other than 0 begin with the number.
            remote: settings for a command on another machine; None if the calling
                command starts the process for itself.
        """
        number = attributes["process"]
        # Process 0 shares the streams of a command on the same machine.
        stream = None if remote is None else subprocess.PIPE
        read_end, reports = os.pipe()
        life, self._life = os.pipe()
        os.set_blocking(self._life, False)
        given = {"reports": reports, "life": life, "attributes": attributes}
        environ = dict(os.environ)
        if remote is not None:
            given["lease"] = remote.lease
            # Absolute paths, because its working folder may differ.
            path = os.pathsep.join(map(os.path.abspath, sys.path))
            environ = {**remote.environ, **environ, "PYTHONPATH": path}
        environ[VARIABLE] = json.dumps(given)
        self._process = subprocess.Popen(
            command,
            cwd=None if remote is None else remote.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            # Only process 0 prints the summary.
            stdout=subprocess.DEVNULL if number else stream,
            stderr=subprocess.PIPE if number else stream,
            pass_fds=(reports, life),
            start_new_session=True,
        )
        os.close(reports)
        os.close(life)
        self.status = ProcessStatus(number, self._process.pid)
        self.is_over = False
        self._log = log
        self._remote = remote
        self._renewed = 0.0  # the time of the last renewal of its lease
        self._polled: float | None = None
        self._quiet = 0.0  # seconds since its last report
        self._has_joined = False
        self._lines: queue.Queue[tuple[str, bytes]] = queue.Queue(MOST_LINES)
        pipes = {
            "reports": os.fdopen(read_end, "rb"),
            "out": self._process.stdout,
            "err": self._process.stderr,
        }
        self._readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True)
            for name, pipe in pipes.items()
            if pipe is not None
        ]
        for reader in self._readers:
            reader.start()

    def poll(self, now: float, limits: Limits) -> None:
        """Checks whether the process has ended or gives no sign of life."""
        if self.is_over:
            return
        # Not clock time: after a pause of the supervisor, reports wait in the pipe.
        passed = 0.0 if self._polled is None else now - self._polled
        self._quiet, self._polled = self._quiet + min(passed, LONGEST_LOOK), now
        self._take_lines()
        if self._process.poll() is not None:
            self._finish()
            return
        if self._remote is not None and now - self._renewed >= 1:
            self._renewed = now
            with suppress(OSError):  # it has ended, or is stopped for a long time
                os.write(self._life, b".")
        # Python may start slowly, for example from a network file system.
        limit = limits.lost_after
        if not self._has_joined:
            limit = max(limit, limits.init_timeout)
        mute = self.status.mute or self._quiet > limit
        silent = self._has_joined and self._quiet > limits.warned_after
        halted = (silent or mute) and (self.status.halted or is_halted(self.status.pid))
        if mute and not self.status.mute:
            self.kill()
        self.status = self.status._replace(silent=silent, halted=halted, mute=mute)

    def signal(self, number: int) -> None:
        """Passes a signal on to the process, not to the processes it started."""
        if not self.is_over:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the process and all processes it started; call `reap` next."""
        if not self.is_over:
            with suppress(OSError):
                os.killpg(self.status.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Waits for the end of the killed process."""
        if not self.is_over:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(REAPING)
            self._finish()

    def _finish(self) -> None:
        self.kill()  # the processes it started end with it
        deadline = time.monotonic() + LAST_WORDS
        for reader in self._readers:
            while reader.is_alive() and time.monotonic() < deadline:
                self._take_lines()
                reader.join(0.01)
        self._take_lines()
        os.close(self._life)
        self.is_over = True
        # The announced code takes precedence: process 0 lingers and is then killed.
        announced = self.status.code
        code = self._process.poll() if announced is None else announced
        self.status = self.status._replace(code=code, silent=False)

    def _read(self, name: str, pipe: IO[bytes]) -> None:
        with pipe:
            for line in iter(partial(pipe.readline, PIECE), b""):
                self._lines.put((name, line.removesuffix(b"\n")))

    def _take_lines(self) -> None:
        number = self.status.process
        for _ in range(self._lines.qsize()):
            name, line = self._lines.get()
            text = line.decode(errors="replace")
            if name == "reports":
                self._take_report(text)
            elif name == "out" and self._remote is not None:
                self._remote.out(text)
            else:
                self._log(f"[{number}] {text}" if number else text)

    def _take_report(self, text: str) -> None:
        self._quiet, self._has_joined = 0.0, True
        try:
            message = json.loads(text)
        except ValueError:  # the pipe was too full for a whole line
            return
        if "note" in message:
            number = self.status.process
            prefix = f"process {number}: " if number else ""
            self._log(f"{prefix}{message['note']}")
        else:
            self.status = self.status._replace(**message)


def is_halted(pid: int) -> bool:
    """Whether a process is stopped, for example by SIGSTOP; False if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The state follows the name, which is in brackets and may contain any character.
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
