"""Exit codes of the commands, and their handlers of signals.

Imports nothing else of the project: supervisors and downloads rely on it.
"""

import atexit
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

DONE, FAILED, BAD_REQUEST, DIVERGED, UNCONNECTED = 0, 1, 2, 3, 4

# EX_TEMPFAIL of sysexits.h: schedulers take it for "queue the job again".
TERMINATED = 75
# 128 + SIGINT, as shells have it.
INTERRUPTED = 130

# Those that ask a program to stop: Ctrl-C, a scheduler, and a terminal that is closed.
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)  # Windows has no SIGHUP
)
_decided: list[int] = []  # the exit code, once it is


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came where an immediate end loses nothing, as in a download."""

    def __init__(self):
        super().__init__(TERMINATED)


def stopped_by(number: int) -> int:
    """The exit code of a program that a signal stopped; the decided one, if it is."""
    if _decided:
        return _decided[0]
    return INTERRUPTED if number == signal.SIGINT else TERMINATED


def is_command() -> bool:
    """Whether this process is one of our commands, not a program that calls them."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("experiments.")


def decide(code: int) -> int:
    """Returns the exit code of our command, which no signal changes from here on."""
    if is_command() and not _decided:
        _decided.append(code)
        # Python ends its handlers before itself; a signal would then kill the process.
        atexit.register(_ignore_signals)
    return code


def is_decided() -> bool:
    """Whether the exit code is decided: the process is about to end."""
    return bool(_decided)


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def handling(
    take: Callable[[int, Any], None], left: tuple[Any, ...] = (None,)
) -> Iterator[None]:
    """Handles the signals of a stop by a function, if this is the main thread.

    It stays their handler once the exit code is decided. SIGHUP stays ignored where it
    is, as nohup has it.

    Args:
        take: the handler.
        left: handlers that stay. None is one that Python did not set, and cannot
            restore.
    """
    # Python raises a ValueError in any other thread.
    main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in SIGNALS if main}
    ours = (signal.SIGINT, signal.SIGTERM)
    before = {
        number: handler
        for number, handler in found.items()
        if handler not in left and (number in ours or handler != signal.SIG_IGN)
    }
    for number in before:
        signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in () if _decided else before.items():
            signal.signal(number, handler)
