"""Decides whether a signal ends a program at once, or asks it to stop.

Before the first dispatch, and during its compilation, there is nothing to save: the
process ends at once. Later the first signal waits for the end of the dispatch.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from experiments.exit_codes import is_command

COMPILER = os.path.join("jax", "_src", "compiler.py")
_owed: list[Callable[[], None]] = []
_trained: set[object] = set()  # runs under way that have something to save


class Stop:
    """The signals that asked a program to stop.

    The program calls this object before each dispatch. A call returns the number of the
    first signal, or 0.

    Attributes:
        received: the numbers of the signals.
    """

    def __init__(self):
        self.received: list[int] = []
        self._looks = False

    def __call__(self) -> int:
        self._looks = True
        return self.received[0] if self.received else 0

    def at_once(self, frame: FrameType | None) -> str:
        """Returns a reason to end the program at once; "" if the signal must wait.

        Args:
            frame: the innermost frame of the main thread.
        """
        # There is nothing to save before the first dispatch, or during its compilation.
        # Later the first signal waits for the dispatch, which a checkpoint then holds.
        if not self._looks:
            return "stopped before training began"
        if _trained or not _is_compiling(frame):
            return ""
        return "stopped while compiling"


@contextmanager
def keeping_results() -> Iterator[Callable[[], None]]:
    """Yields a function that a run calls once it has something to save."""
    run = object()
    try:
        yield lambda: _trained.add(run)
    finally:
        _trained.discard(run)


def _is_compiling(frame: FrameType | None) -> bool:
    """Whether jax traces a program of the engine, or compiles any program."""
    # Already imported, if any program compiles.
    from syncalgos.engine.compiled import Compiled

    while frame is not None:
        code = frame.f_code
        if code is Compiled.compile.__code__ or code.co_filename.endswith(COMPILER):
            return True
        frame = frame.f_back
    return False


def interrupt(error: BaseException, code: int) -> NoReturn:
    """Ends the process with a code if it is our command; else raises the error."""
    # Raising is not enough: an error is lost in a callback from C++, crashes the import
    # of an extension module, and waits for XLA to compile (20 to 70 s on ResNet-50).
    if is_command():
        end(code)
    raise error


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
