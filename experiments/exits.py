"""How the programs end: exit codes, signals, and what a user is told."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper

from experiments.errors import BadRequest

DONE, BAD_REQUEST, DIVERGED, TERMINATED, INTERRUPTED = 0, 2, 3, 75, 130

Stopped = Callable[[], bool]


def guarded(program: Callable[[Stopped], int | None]) -> int:
    """Runs a program whose errors are one line, and that signals stop gently.

    Args:
        program: given a function that tells whether it was asked to stop, it returns
            its exit code, or None if it stopped because it was asked to.

    Returns:
        The exit code: 2 for a bad request, 75 for a stop by SIGTERM, 130 for one by
        Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks × shows ?
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with _stop_signals() as received:
            code = program(lambda: bool(received))
    except BadRequest as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_REQUEST
    except KeyboardInterrupt:
        return INTERRUPTED
    if code is None:
        return TERMINATED if signal.SIGTERM in received else INTERRUPTED
    return code


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM; a second one ends the process at once."""
    received: list[int] = []

    def note(number, frame):
        if received:
            os._exit(TERMINATED if number == signal.SIGTERM else INTERRUPTED)
        received.append(number)
        print(
            "stopping after this dispatch; once more stops at once",
            file=sys.stderr,
            flush=True,
        )

    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
