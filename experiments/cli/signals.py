"""Decides whether a signal ends a program at once, or asks it to stop by itself."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

COMPILER = os.path.join("jax", "_src", "compiler.py")
_owed: list[Callable[[], None]] = []
_trained: set[object] = set()  # runs under way that have something to keep


class Stop:
    """The signals that ask a program to stop.

    Calling it returns the number of one, or 0. The program does so before each
    dispatch, and stops by itself.

    Attributes:
        received: the signals' numbers.
    """

    def __init__(self):
        self.received: list[int] = []
        self._looks = False

    def __call__(self) -> int:
        self._looks = True
        return max(self.received, default=0)

    def at_once(self, frame: FrameType | None) -> str:
        """Says why the program need not be waited for; "" where it must be.

        Args:
            frame: where the main thread is.
        """
        if not self._looks:
            return "stopped before training began"
        lost = bool(_trained)
        return "stopped while compiling" if not lost and _is_compiling(frame) else ""


@contextmanager
def keeping_results() -> Iterator[Callable[[], None]]:
    """Yields what a run calls once it has trained: from then on it stops by itself."""
    run = object()
    try:
        yield lambda: _trained.add(run)
    finally:
        _trained.discard(run)


def _is_compiling(frame: FrameType | None) -> bool:
    """Whether jax traces or compiles a program of the engine, or compiles any."""
    from syncalgos.engine.compiled import Compiled  # imported long ago, where one looks

    while frame is not None:
        code = frame.f_code
        if code is Compiled._compile.__code__ or code.co_filename.endswith(COMPILER):
            return True
        frame = frame.f_back
    return False


def interrupt(error: BaseException, code: int) -> NoReturn:
    """Ends the process by a code if it is a command of ours, else raises the error.

    To raise is not enough there: an error is lost in a callback from C++, crashes the
    import of an extension module, and waits until XLA has compiled.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.startswith("experiments."):
        end(code)
    raise error


@contextmanager
def before_the_end(action: Callable[[], None]) -> Iterator[None]:
    """Calls an action when left, or before the process is ended at once."""
    _owed.append(action)
    try:
        yield
    finally:
        _owed.remove(action)
        action()


def end(code: int) -> NoReturn:
    """Ends the process at once, whatever it does."""
    for action in _owed:
        action()
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # the cursor, which a bar may have hidden
    os._exit(code)
