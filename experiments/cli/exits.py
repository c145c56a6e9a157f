"""Exits of the programs: errors in one line, signals, and output that never fails."""

import atexit
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, TextIO

from experiments import exit_codes
from experiments.cli.errors import BadRequest, check_working_folder, in_one_line
from experiments.cli.signals import Stop, end, interrupt
from experiments.exit_codes import (
    Terminated,
    decide,
    handling,
    is_decided,
    stopped_by,
)

Stopped = Callable[[], int]
"""Returns the number of the signal that asks the program to stop, or 0."""

# Escape sequences of terminals: CSI, then strings such as a window's title, then all
# others. A string without an end does not count, as it would hide everything after it.
# The search for an end is bounded, because it would otherwise take quadratic time.
_ESCAPES = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"
    "|(?:\x1b[PX\\]^_]|[\x90\x98\x9d-\x9f]).{0,2000}?(?:\x07|\x1b\\\\|\x9c)"
    "|\x1b[ -/]*[0-~]",
    re.DOTALL,
)
_BREAKS = re.compile("[\t-\r\x85\u2028\u2029]+")
_CONTROLS = re.compile(  # and marks of the direction of writing
    "[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def guarded(program: Callable[[Stopped], int | None], has_starter: bool = False) -> int:
    """Runs a program: errors become one line, and a signal stops it gently.

    Args:
        program: takes a function that returns the signal that asks it to stop, and
            returns its exit code, or None if it stopped because of that signal.
        has_starter: whether another process of ours ends this one at a second signal. A
            scheduler may send the first signal to both.

    Returns:
        The exit code: 2 for a bad request, 75 for a stop by SIGTERM or SIGHUP, 130 for
        one by Ctrl-C.
    """

    def answered(stopped: Stopped) -> int | None:
        try:
            check_working_folder()
            return program(stopped)
        except BadRequest as error:
            say(f"error: {in_one_line(error)}")
            return error.code
        except KeyboardInterrupt:
            return exit_codes.INTERRUPTED
        except Terminated:
            return exit_codes.TERMINATED

    # A run makes a million objects that stay. Collecting garbage among them after every
    # 700, and once more at the end, would take an eighth of the default run.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    with unfailing_output():
        return watched(answered, has_starter)


def say(text: str) -> None:
    """Prints a line on stderr, and ignores failures."""
    with suppress(OSError, ValueError):  # a ValueError if the stream is closed
        print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Returns the text as one line without control characters.

    Error messages may hold anything that a file or another machine sent.
    """
    text = _BREAKS.sub(" ", _ESCAPES.sub("", text))
    return _CONTROLS.sub("", text).rstrip()


@contextmanager
def unfailing_output() -> Iterator[None]:
    """Makes stdout and stderr drop text that they cannot write instead of raising.

    A pipe may be broken, a disk full, or the stream closed: a run must still be able to
    write its checkpoint.
    """
    before = sys.stdout, sys.stderr
    # Closed descriptors are filled first. Otherwise the next files to be opened get
    # their numbers, and libraries print into these files.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout, sys.stderr = _unfailing(sys.stdout, 1), _unfailing(sys.stderr, 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _unfailing(stream: Any, descriptor: int) -> Any:
    """Returns a stream to the same file that never fails, if there is a file."""
    if stream is None:  # it is closed
        return unfailing(descriptor)
    if not isinstance(stream, TextIOWrapper):
        return stream
    # Buffered text must come before the text of the new stream.
    with suppress(OSError):
        stream.flush()
    try:
        return unfailing(stream.fileno(), stream.encoding)
    except OSError:  # it writes to no file
        return stream


def unfailing(descriptor: int, encoding: str = "utf-8") -> TextIO:
    """Returns a text stream to an open file that never fails."""
    raw = BufferedWriter(_Unfailing(descriptor, "w", closefd=False))
    # A terminal that lacks × shows ?.
    return TextIOWrapper(raw, encoding, "replace", line_buffering=True)


def sole_output(is_first: bool) -> TextIO:
    """Reserves stdout for the summary, and silences all processes but the first.

    gloo prints its connections on the process's stdout. That output is dropped, and the
    summary goes to a copy of the descriptor.

    Args:
        is_first: whether this is process 0.

    Returns:
        The stream for notes and tracebacks, from any process.
    """
    errors = unfailing(2, sys.stderr.encoding)
    sys.stdout, sys.stderr = unfailing(os.dup(1), sys.stdout.encoding), errors
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not is_first:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    return errors


class _Unfailing(FileIO):
    """A file that accepts everything, and drops text that it cannot write."""

    def write(self, data: Any) -> int:
        """Writes as much as possible, and reports everything as written."""
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def watched(program: Callable[[Stopped], int | None], has_starter: bool = False) -> int:
    """Runs a program, which a signal stops gently; returns its exit code.

    Args:
        program: as in `guarded`.
        has_starter: as in `guarded`.
    """
    stop = Stop()

    def note(number, frame):
        if stop.received and not has_starter:
            end(stopped_by(stop()))
        stop.received.append(number)
        if stop.received[1:] or is_decided():
            return
        why = stop.at_once(frame)
        line = why or "stopping after this dispatch; a second signal stops at once"
        with suppress(RuntimeError):  # the signal came while a line was being printed
            if not (why and has_starter):  # all its processes would say so
                say(line)
        if why:
            error = KeyboardInterrupt() if number == signal.SIGINT else Terminated()
            interrupt(error, stopped_by(number))

    with handling(note):
        code = program(stop)
        return decide(stopped_by(stop()) if code is None else code)
