"""One process as the supervisor that started it has it: its pipes, its end."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.cli.exits import say
from experiments.supervisor.child_side import VARIABLE
from experiments.supervisor.group import Rules
from experiments.supervisor.hosts.wire import PIECE, Lines, decode
from experiments.supervisor.process_status import Seen

REAPING = 5.0  # seconds; what a driver holds longer than that is left to the system


class Pipe:
    """The reading end of a pipe, whose lines go to a function; never blocks."""

    def __init__(
        self,
        end: int,
        take: Callable[[bytes], None],
        selector: selectors.BaseSelector,
    ):
        os.set_blocking(end, False)
        self._end: int | None = end
        self._take = take
        self._selector = selector
        self._lines = Lines()
        selector.register(end, selectors.EVENT_READ, self.read)

    def read(self) -> bool:
        """Takes what has come; whether there was anything."""
        if self._end is None:
            return False
        try:
            data = os.read(self._end, PIECE)
        except BlockingIOError:
            return False
        for line in self._lines.feed(data):
            self._take(line)
        if not data:
            self._close()
        elif len(self._lines.rest) > PIECE:
            self._flush()
        return bool(data)

    def finish(self) -> None:
        """Takes what is left, of a process that has ended."""
        for _ in range(64):  # a helper out of reach may still write
            if not self.read():
                break
        self._close()

    def _flush(self) -> None:
        rest, self._lines.rest = self._lines.rest, b""
        if rest:
            self._take(rest)

    def _close(self) -> None:
        if self._end is not None:
            self._flush()
            self._selector.unregister(self._end)
            os.close(self._end)
            self._end = None


class Child:
    """A process in a session of its own, with what it and the system tell of it.

    Attributes:
        seen: what is known of it.
    """

    def __init__(
        self,
        command: list[str],
        told: dict[str, Any],
        prefixed: bool,
        selector: selectors.BaseSelector,
    ):
        """Starts it.

        Args:
            command: its argv.
            told: the attributes of its Member.
            prefixed: print its stderr behind its number, instead of sharing ours.
            selector: of the event loop; data are functions to call.
        """
        number = told["process"]
        reading, reports = os.pipe()
        life, self._life = os.pipe()
        told = {**told, "reports": reports, "life": life}
        self._process = subprocess.Popen(
            command,
            env={**os.environ, VARIABLE: json.dumps(told)},
            stdin=subprocess.DEVNULL,
            stdout=None if number == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if prefixed else None,
            pass_fds=(reports, life),
            start_new_session=True,
        )
        os.close(reports)
        os.close(life)
        self.seen = Seen(number, self._process.pid)
        self._over = False
        self._heard = time.monotonic()
        self._joined = False
        self._pipes = [Pipe(reading, self._report, selector)]
        if self._process.stderr is not None:
            end = os.dup(self._process.stderr.fileno())
            self._process.stderr.close()
            self._pipes.append(Pipe(end, self._echo, selector))

    def poll(self, now: float, rules: Rules) -> None:
        """Looks whether it has ended, or gives no sign of life."""
        if self._over:
            return
        if self._process.poll() is not None:
            self._finish()
            return
        quiet = now - self._heard
        # Python may take its time to start, as from a network's file system.
        patience = rules.loss if self._joined else max(rules.loss, rules.init_timeout)
        silent = self._joined and quiet > rules.silence
        mute = self.seen.mute or quiet > patience
        halted = (silent or mute) and (self.seen.halted or _halted(self.seen.pid))
        if mute and not self.seen.mute:
            self._signal_all(signal.SIGKILL)
        self.seen = self.seen._replace(silent=silent, halted=halted, mute=mute)

    def signal(self, number: int) -> None:
        """Passes a signal on to the process alone, not to those that it started."""
        if not self._over:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kills it and all that it started; `reap` follows."""
        if not self._over:
            self._signal_all(signal.SIGKILL)

    def reap(self) -> None:
        """Waits for the end of a killed process."""
        if not self._over:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(REAPING)
            self._finish()

    def _finish(self) -> None:
        self._signal_all(signal.SIGKILL)  # what it has started goes with it
        for pipe in self._pipes:
            pipe.finish()
        os.close(self._life)
        self._over = True
        if (code := self.seen.code) is None:  # else it has said how it will end
            code = self._process.returncode
        self.seen = self.seen._replace(code=code, silent=False)

    def _signal_all(self, number: int) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, number)

    def _report(self, line: bytes) -> None:
        self._heard = time.monotonic()
        self._joined = True
        message = decode(line) or {}
        if "note" in message:
            number = self.seen.process
            say(f"process {number}: {message['note']}" if number else message["note"])
        else:
            self.seen = self.seen._replace(**message)

    def _echo(self, line: bytes) -> None:
        say(f"[{self.seen.process}] {line.decode(errors='replace')}")


def _halted(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False where the system won't say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
