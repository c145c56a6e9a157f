"""A process that makes the runs of a job: python -m experiments.study.running.child.

It reads requests from stdin, a line each, and answers in lines of JSON on its stdout.
So devices and threads are set before jax starts, and a crash ends this process alone.
An empty message is a sign of life, which a process gives while it compiles, too.
"""

import errno
import io
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from experiments.launch.supervisor.child_side import BEAT, end_all
from experiments.launch.supervisor.json_lines import decode, encode

IDLE = 15.0  # seconds without a request after which it ends
PAUSE = 0.2  # seconds between two reports of a step

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

Write = Callable[[dict[str, Any]], None]


class Line:
    """The report of a run: lines to the worker."""

    def __init__(self, write: Write):
        self._write, self._last = write, 0.0

    def begin(self, steps: int) -> None:
        """Reports the number of local steps."""
        self._write({"begin": steps})

    def step(self, done: int, loss: float) -> None:
        """Reports the local steps done, now and then."""
        if time.monotonic() - self._last > PAUSE:
            self._last = time.monotonic()
            self._write({"step": done, "loss": loss})

    def line(self, text: str) -> None:
        """Ignores an evaluation."""

    def note(self, text: str) -> None:
        """Reports a caution."""
        self._write({"note": text})


class Notes(io.TextIOBase):
    """The stream in place of stderr: what Python prints there are cautions."""

    def __init__(self, write: Write):
        self._write = write

    def write(self, text: str) -> int:
        """Reports each line that is not blank."""
        for line in filter(None, map(str.strip, text.splitlines())):
            self._write({"note": line})
        return len(text)


def main() -> None:
    """Answers requests until stdin closes, or none has come for a while."""
    write = _take_stdout()
    sys.stderr = Notes(write)
    threading.Thread(target=_beat, args=(write,), daemon=True).start()
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    from experiments.study.grid import Loader  # imports jax
    from experiments.study.running.maker import Maker

    loader = Loader()
    maker = Maker(loader)
    while True:
        try:
            request = requests.get(timeout=IDLE)
        except queue.Empty:
            return
        try:
            _check_code(request.pop("own"))
            if "folder" in request:
                write({"made": _make(maker, Line(write), **request)})
            else:
                write(_introduced(loader, **request))
        # The worker says it to the study, which goes on.
        except Exception as error:
            write(_failure(error))


@cache
def _digests(names: tuple[str, ...]) -> dict[str, str]:
    from experiments.study.running.versions import of_modules

    return of_modules([f"{name}:" for name in names])


def _check_code(own: dict[str, str]) -> None:
    """Checks the user's own modules, as they were when this process loaded them."""
    from experiments.cli.errors import BadRequest

    for name, digest in _digests(tuple(own)).items():
        if digest != own[name]:
            raise BadRequest(f"its code of {name} differs from the command's")


def _introduced(loader: Any, argv: list[str], seed: int) -> dict[str, Any]:
    """Checks a run's flags, loads its data, and returns what all workers must share."""
    from experiments.study.running.versions import of_settings

    devices = loader.components(argv, seed).trainer.layout.devices
    return {
        "devices": f"{len(devices)} {devices[0].platform}",
        "settings": of_settings(),
    }


def _make(maker: Any, line: Line, argv: list[str], seed: int, folder: str) -> str:
    """Makes a run, which nothing but the end of this process stops."""
    return maker.make(argv, seed, Path(folder), line, lambda: 0)


def _failure(error: Exception) -> dict[str, Any]:
    """Returns the answer for a run that raised an error."""
    from experiments.study.running.serial import described

    line, is_request = described(error)
    # A full disk would fail all others, too.
    is_disk = isinstance(error, OSError) and error.errno in FULL
    return {"disk" if is_disk else "failed": line, "is_request": is_request}


def _take_stdout() -> Write:
    """Keeps stdout for the answers: what libraries print goes to stderr."""
    answers, lock = os.dup(1), threading.Lock()
    os.dup2(2, 1)

    def write(message: dict[str, Any]) -> None:
        data = encode(message)
        with lock:
            while data:
                data = data[os.write(answers, data) :]

    return write


def _beat(write: Write) -> NoReturn:
    """Gives signs of life."""
    while True:
        write({})
        time.sleep(BEAT)


def _read(requests: "queue.SimpleQueue[dict[str, Any]]") -> NoReturn:
    """Passes requests on; ends the process once the worker is gone."""
    for line in sys.stdin.buffer:
        requests.put(decode(line) or {})
    end_all()


if __name__ == "__main__":
    main()
