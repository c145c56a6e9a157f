"""Exit codes of the commands, and their handlers of signals.

Imports nothing else of the project: supervisors and downloads rely on it.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

DONE, FAILED, BAD_REQUEST, DIVERGED, UNCONNECTED = 0, 1, 2, 3, 4

# EX_TEMPFAIL of sysexits.h: schedulers take it for "queue the job again".
TERMINATED = 75
# 128 + SIGINT, as shells have it.
INTERRUPTED = 130


class Terminated(SystemExit):
    """SIGTERM arrived where an immediate end loses nothing, as in a download."""

    def __init__(self):
        super().__init__(TERMINATED)


def stopped_by(number: int) -> int:
    """The exit code of a program that a signal stopped."""
    return TERMINATED if number == signal.SIGTERM else INTERRUPTED


@contextmanager
def handling(
    take: Callable[[int, Any], None], left: tuple[Any, ...] = (None,)
) -> Iterator[None]:
    """Handles SIGINT and SIGTERM by a function, if this is the main thread.

    Args:
        take: the handler.
        left: handlers that stay. None is one that Python did not set, and cannot
            restore.
    """
    # Python raises a ValueError in any other thread.
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    found = {number: signal.getsignal(number) for number in numbers}
    before = {n: handler for n, handler in found.items() if handler not in left}
    for number in before:
        signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
