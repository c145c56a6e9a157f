"""Signals, exit codes, and output that never fails.

This module imports nothing else of the project, so that downloads can import it.
"""

import atexit
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from types import FrameType
from typing import Any, NoReturn, TextIO

COMPLETED = 0
FAILED = 1
BAD_REQUEST = 2
DIVERGED = 3
UNCONNECTED = 4

# EX_TEMPFAIL of sysexits.h: schedulers read it as "queue the job again".
TERMINATED = 75
# 128 + SIGINT, as in shells.
INTERRUPTED = 130

# The signals that ask a program to stop: Ctrl-C, a scheduler, a closed terminal (which
# Windows does not tell).
SIGNALS = [x for x in signal.Signals if x.name in ("SIGINT", "SIGTERM", "SIGHUP")]
_decided: list[int] = []  # the exit code, once it is decided
_owed: list[Callable[[], None]] = []
_trained: set[object] = set()  # runs under way that have something to save
_compiling: set[object] = set()  # blocks under way in which programs are compiled

ReadSignal = Callable[[], int]
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


class Terminated(SystemExit):
    """SIGTERM or SIGHUP, received where ending at once loses nothing."""

    def __init__(self):
        super().__init__(TERMINATED)


def stop_code(number: int) -> int:
    """Returns the decided exit code, if any, or that of a stop by this signal."""
    if _decided:
        return _decided[0]
    return INTERRUPTED if number == signal.SIGINT else TERMINATED


def is_command() -> bool:
    """Whether this process is one of our commands, not a program that imports them."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("experiments.")


def decide(code: int) -> int:
    """Fixes and returns our command's exit code, which no signal changes afterwards."""
    if is_command() and not _decided:
        _decided.append(code)
        # Python removes its handlers before it exits: a signal could then kill it.
        for number in SIGNALS:
            atexit.register(signal.signal, number, signal.SIG_IGN)
    return code


@contextmanager
def handling(
    take: Callable[[int, Any], None], kept_handlers: tuple[Any, ...] = (None,)
) -> Iterator[None]:
    """Installs a handler for the stop signals, if this is the main thread.

    The handler stays once the exit code is decided. An ignored SIGHUP stays ignored, as
    under nohup.

    Args:
        take: the handler.
        kept_handlers: existing handlers that are not replaced. None stands for a
            handler that Python did not set and cannot restore.
    """
    # Python raises a ValueError in any other thread.
    is_main = threading.current_thread() is threading.main_thread()
    earlier_handlers = {}
    for number in SIGNALS if is_main else ():
        handler = signal.getsignal(number)
        is_nohup = number.name == "SIGHUP" and handler == signal.SIG_IGN
        if handler not in kept_handlers and not is_nohup:
            earlier_handlers[number] = signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in () if _decided else earlier_handlers.items():
            signal.signal(number, handler)


def signal_name(number: int) -> str:
    """Names a signal; a real-time signal is shown by its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Stop:
    """The signals that asked a program to stop.

    The program calls this object before each dispatch. A call returns the number of the
    first signal, or 0.

    Args:
        has_starter: whether another process of ours ends this one at a second signal. A
            scheduler may send the first signal to both.
    """

    def __init__(self, has_starter: bool):
        self._received: list[int] = []
        self._looks = False
        self._has_starter = has_starter

    def __call__(self) -> int:
        self._looks = True
        return self._received[0] if self._received else 0

    def handle(self, number: int, _: FrameType | None) -> None:
        """Handles a signal: it ends the program at once, or waits for the dispatch."""
        if self._received and not self._has_starter:
            end(stop_code(self._received[0]))
        self._received.append(number)
        if self._received[1:] or _decided:
            return
        why = self._reason_to_end()
        if not (why and self._has_starter):  # all its processes would say so
            line = why or "stopping after this dispatch; a second signal stops at once"
            try:
                say(line)
            except RuntimeError:  # it came while a line was being printed
                with suppress(OSError):
                    os.write(2, f"{line}\n".encode())
        if why:
            # Raising is not enough: an error is lost in a callback from C++, crashes
            # the import of an extension module, and waits for XLA to compile (20 to
            # 70 s on ResNet-50).
            if is_command():
                end(stop_code(number))
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    def _reason_to_end(self) -> str:
        """Returns a reason to end the program at once; "" if the signal must wait.

        There is nothing to save before the first dispatch, or during its compilation.
        Later the first signal waits for the dispatch, which a checkpoint then holds.
        """
        if not self._looks:
            return "stopped with nothing to save"
        if _compiling and not _trained:
            return "stopped while compiling"
        return ""


@contextmanager
def keeping_results() -> Iterator[Callable[[], None]]:
    """Yields a function that a run calls once it has something to save."""
    run = object()
    try:
        yield lambda: _trained.add(run)
    finally:
        _trained.discard(run)


@contextmanager
def compiling() -> Iterator[None]:
    """Marks a block that compiles programs, which a signal may end at once."""
    block = object()
    _compiling.add(block)
    try:
        yield
    finally:
        _compiling.discard(block)


@contextmanager
def before_the_end(action: Callable[[], None]) -> Iterator[None]:
    """Calls an action when the block ends, or before the process ends at once."""
    _owed.append(action)
    try:
        yield
    finally:
        _owed.remove(action)
        action()


def end(code: int) -> NoReturn:
    """Ends the process at once."""
    # Each action once, even if another signal calls this function again meanwhile.
    while _owed:
        _owed.pop()()
    with suppress(OSError):  # the terminal is closed
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")  # shows the cursor, which a bar may have hidden
    os._exit(code)


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
    streams = sys.stdout, sys.stderr
    # Closed descriptors are filled first. Otherwise the next files to be opened get
    # their numbers, and libraries print into these files.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    sys.stdout = _unfailing(sys.stdout, 1)
    sys.stderr = _unfailing(sys.stderr, 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = streams


def _unfailing(stream: Any, descriptor: int) -> Any:
    """Returns a stream to the same file that never fails, if there is a file."""
    if isinstance(stream, TextIOWrapper):
        # Buffered text must come before the text of the new stream.
        with suppress(OSError):
            stream.flush()
        with suppress(OSError):  # it writes to no file
            return unfailing(stream.fileno(), stream.encoding)
    return unfailing(descriptor) if stream is None else stream  # None: it is closed


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
    sys.stdout = unfailing(os.dup(1), sys.stdout.encoding)
    sys.stderr = errors
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
