"""A process on the side of the supervisor that started it: its pipes and its end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from experiments.launch.supervisor.child_side import VARIABLE
from experiments.launch.supervisor.group import Log, Rules
from experiments.launch.supervisor.json_lines import PIECE, Lines, decode
from experiments.launch.supervisor.process_status import ProcessStatus

# Seconds. A process that a driver holds longer than that is left to the system.
REAPING = 5.0

# Reads of a pipe at once: a helper that outlives the process may write for ever.
MOST_READS = 64


class Pipe:
    """The reading end of a pipe; never blocks."""

    def __init__(self, stream: IO[bytes]):
        os.set_blocking(stream.fileno(), False)
        self._stream = stream
        self._lines = Lines()

    def read(self) -> Iterator[bytes]:
        """Yields the lines that came since the last call."""
        for _ in range(MOST_READS):
            # None if there is nothing to read now, nothing at the pipe's end.
            if not (data := self._stream.read(PIECE)):
                break
            yield from self._lines.feed(data)
        # A line without an end must not fill the memory.
        if len(self._lines.rest) > PIECE:
            yield self._lines.flush()

    def finish(self) -> Iterator[bytes]:
        """Yields the last lines, and closes the pipe."""
        yield from self.read()
        if self._lines.rest:
            yield self._lines.flush()
        self._stream.close()


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
    """A process in a session of its own.

    Attributes:
        status: its last reports, and the system's.
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
        own = None if remote is None else subprocess.PIPE
        read_end, reports = os.pipe()
        life, self._life = os.pipe()
        os.set_blocking(self._life, False)
        given = {"reports": reports, "life": life, "attributes": attributes}
        environ = dict(os.environ)
        if remote is not None:
            given["lease"] = remote.lease
            environ = {**remote.environ, **environ, "PYTHONPATH": search_path()}
        environ[VARIABLE] = json.dumps(given)
        self._process = subprocess.Popen(
            command,
            cwd=None if remote is None else remote.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            # The summary is process 0's alone.
            stdout=own if number == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if is_prefixed else own,
            bufsize=0,
            pass_fds=(reports, life),
            # Its own session, so that Ctrl-C reaches this command alone, and one kill
            # reaches all that it started.
            start_new_session=True,
        )
        os.close(reports)
        os.close(life)
        self.status = ProcessStatus(number, self._process.pid)
        self._log = log
        self._prefix = f"[{number}] " if is_prefixed else ""
        self._is_renewed = remote is not None
        self._renewed = 0.0  # the time at which its lease was
        self._is_over = False
        self._last_report = time.monotonic()
        self._has_joined = False
        self._pipes = [
            (Pipe(os.fdopen(read_end, "rb", buffering=0)), self._take_report)
        ]
        if self._process.stderr is not None:
            self._pipes.append((Pipe(self._process.stderr), self._echo))
        if self._process.stdout is not None and remote is not None:
            take_line = partial(_take_text, remote.out)
            self._pipes.append((Pipe(self._process.stdout), take_line))

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and all that it wrote was read."""
        return self._is_over

    def poll(self, now: float, rules: Rules) -> None:
        """Finds whether the process ended, or gives no sign of life."""
        if self._is_over:
            return
        # Before the clock is read: after a pause of the supervisor, reports wait here.
        for pipe, take in self._pipes:
            for line in pipe.read():
                take(line)
        if self._process.poll() is not None:
            self._finish()
            return
        self._renew(now)
        quiet = now - self._last_report
        # Python may start slowly, as from a network's file system.
        longest = max(rules.loss, rules.init_timeout)
        mute = self.status.mute or quiet > (rules.loss if self._has_joined else longest)
        silent = self._has_joined and quiet > rules.silence
        halted = (silent or mute) and (self.status.halted or is_halted(self.status.pid))
        if mute and not self.status.mute:
            self._signal_all(signal.SIGKILL)
        self.status = self.status._replace(silent=silent, halted=halted, mute=mute)

    def signal(self, number: int) -> None:
        """Passes a signal on to the process alone, not to those that it started."""
        if not self._is_over:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the process and all that it started; `reap` follows."""
        if not self._is_over:
            self._signal_all(signal.SIGKILL)

    def reap(self) -> None:
        """Waits for the end of the killed process."""
        if not self._is_over:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(REAPING)
            self._finish()

    def _finish(self) -> None:
        # Processes that it started end with it.
        self._signal_all(signal.SIGKILL)
        for pipe, take in self._pipes:
            for line in pipe.finish():
                take(line)
        os.close(self._life)
        self._is_over = True
        # The announced code goes first: process 0 lingers, and is killed for it.
        announced = self.status.code
        code = self._process.returncode if announced is None else announced
        self.status = self.status._replace(code=code, silent=False)

    def _signal_all(self, number: int) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, number)

    def _take_report(self, line: bytes) -> None:
        self._last_report = time.monotonic()
        self._has_joined = True
        message = decode(line) or {}
        if "note" in message:
            number = self.status.process
            prefix = f"process {number}: " if number else ""
            self._log(f"{prefix}{message['note']}")
        else:
            self.status = self.status._replace(**message)

    def _echo(self, line: bytes) -> None:
        # Whose line it is: the processes share one terminal.
        self._log(f"{self._prefix}{line.decode(errors='replace')}")

    def _renew(self, now: float) -> None:
        """Renews the lease of a remote command's process, once a second."""
        if self._is_renewed and now - self._renewed >= 1:
            self._renewed = now
            with suppress(OSError):  # it has ended, or is stopped for a long time
                os.write(self._life, b".")


def search_path() -> str:
    """Returns a PYTHONPATH by which a process finds the modules that this one does.

    Paths are absolute, as its working folder may be another one.
    """
    return os.pathsep.join(map(os.path.abspath, sys.path))


def _take_text(take: Log, line: bytes) -> None:
    take(line.decode(errors="replace"))


def is_halted(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False where that is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The state follows the name, which is in brackets and may hold any character.
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
