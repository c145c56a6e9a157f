"""How the programs end: exit codes, signals, and what a user is told."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper

from experiments.errors import BadRequest, Terminated
from experiments.stopping import Stop, end, interrupt

DONE, FAILED, BAD_REQUEST, DIVERGED, UNCONNECTED = 0, 1, 2, 3, 4
TERMINATED, INTERRUPTED = 75, 130

Stopped = Callable[[], int]
"""() -> the number of the signal that asks the program to stop, or 0."""


def guarded(program: Callable[[Stopped], int | None]) -> int:
    """Runs a program whose errors are one line, and that signals stop gently.

    Args:
        program: given a function that tells by which signal it was asked to stop, it
            returns its exit code, or None if it stopped because it was asked to.

    Returns:
        The exit code: 2 for a bad request, 75 for a stop by SIGTERM, 130 for one by
        Ctrl-C.
    """
    never_fail_to_print()
    try:
        return watched(program)
    except BadRequest as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_REQUEST
    except KeyboardInterrupt:
        return INTERRUPTED
    except Terminated:
        return TERMINATED


def never_fail_to_print() -> None:
    """A terminal that lacks × shows ?."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def watched(
    program: Callable[[Stopped], int | None], is_supervised: bool = False
) -> int:
    """Runs a program that signals stop gently, and returns its exit code.

    Args:
        program: as in `guarded`.
        is_supervised: whether somebody else ends it at a second signal: a scheduler
            may send the first one to both.
    """
    with _stop_signals(is_supervised) as stop:
        code = program(stop)
    return stopped_by(stop()) if code is None else code


def stopped_by(number: int) -> int:
    """The exit code of a program that a signal stopped."""
    return TERMINATED if number == signal.SIGTERM else INTERRUPTED


@contextmanager
def _stop_signals(is_supervised: bool) -> Iterator[Stop]:
    """Collects SIGINT and SIGTERM; a second one ends a process that is by itself."""
    stop = Stop()

    def note(number, frame):
        if stop.received and not is_supervised:
            end(stopped_by(number))
        stop.received.append(number)
        if stop.received[1:]:
            return
        why = "" if is_supervised else stop.at_once(frame)
        print(
            why or "stopping after this dispatch; once more stops at once",
            file=sys.stderr,
            flush=True,
        )
        if why:
            error = KeyboardInterrupt() if number == signal.SIGINT else Terminated()
            interrupt(error, stopped_by(number))

    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
