"""A child process in a session of its own, whose lines are read by threads."""

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import IO, Any

PIECE = 1 << 16  # bytes after which a line without an end is cut
MOST_LINES = 1000  # that wait to be taken, before the process has to wait
LAST_WORDS = 2.0  # seconds for the ends of pipes, which what it started may hold open
REAPING = 5.0  # seconds; what a driver holds longer than that is left to the system


class ChildProcess:
    """A child process: Ctrl-C does not reach it, and a kill reaches all it started."""

    def __init__(self, command: list[str], **given: Any):
        """Starts the process.

        Args:
            command: its argv.
            given: as subprocess.Popen takes it; its pipes are read.
        """
        self._process = subprocess.Popen(command, start_new_session=True, **given)
        self._lines: queue.Queue[tuple[str, bytes]] = queue.Queue(MOST_LINES)
        self._readers: list[threading.Thread] = []
        for name in ("stdout", "stderr"):
            if (stream := getattr(self._process, name)) is not None:
                self.read(name, stream)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def read(self, name: str, stream: IO[bytes]) -> None:
        """Reads one more pipe, whose lines come by a name."""
        reader = threading.Thread(target=self._read, args=(name, stream), daemon=True)
        reader.start()
        self._readers.append(reader)

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """Yields the lines since the last call, each with its pipe's name."""
        for _ in range(self._lines.qsize()):
            yield self._lines.get()

    def last_lines(self) -> Iterator[tuple[str, bytes]]:
        """Yields the lines up to the ends of the pipes, once the process has ended."""
        deadline = time.monotonic() + LAST_WORDS
        for reader in self._readers:
            while reader.is_alive() and time.monotonic() < deadline:
                yield from self.lines()
                reader.join(0.01)
        yield from self.lines()

    def signal(self, number: int) -> None:
        """Sends the process alone a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the process, if it runs, and all that it started."""
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Waits for the end of the killed process."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAPING)

    def _read(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for line in iter(partial(stream.readline, PIECE), b""):
                self._lines.put((name, line.removesuffix(b"\n")))
