"""Exit codes of the commands, and their signal handlers.

This module imports nothing else of the project, so that downloads can import it.
"""

import atexit
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

DONE, FAILED, BAD_REQUEST, DIVERGED, UNCONNECTED = 0, 1, 2, 3, 4

# EX_TEMPFAIL of sysexits.h: schedulers read it as "queue the job again".
TERMINATED = 75
# 128 + SIGINT, as in shells.
INTERRUPTED = 130

# The signals that ask a program to stop: Ctrl-C, a scheduler, a closed terminal.
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)  # Windows has no SIGHUP
)
_decided: list[int] = []  # the exit code, once it is decided


class Terminated(SystemExit):
    """SIGTERM or SIGHUP, received where ending at once loses nothing."""

    def __init__(self):
        super().__init__(TERMINATED)


def stopped_by(number: int) -> int:
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
    """Installs a handler for the stop signals, if this is the main thread.

    The handler stays once the exit code is decided. An ignored SIGHUP stays ignored, as
    under nohup.

    Args:
        take: the handler.
        left: existing handlers that are not replaced. None stands for a handler that
            Python did not set and cannot restore.
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


def signal_name(number: int) -> str:
    """Names a signal; a real-time signal is shown by its number."""
    names = (known.name for known in signal.Signals if known == number)
    return next(names, f"signal {number}")
