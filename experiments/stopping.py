"""Whether a signal ends a program at once, or asks it to stop by itself."""

import os
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

COMPILER = os.path.join("jax", "_src", "compiler.py")
PATIENCE = 1.0  # seconds


class Stop:
    """What a program knows of the signals that ask it to stop.

    Calling it returns the number of one, or 0. The program does so before each
    dispatch: from the first call on it has something to keep, and stops by itself.

    Attributes:
        received: the signals' numbers.
    """

    def __init__(self):
        self.received: list[int] = []
        self._looks = False
        self._last_resort: threading.Timer | None = None

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
        return "stopped while compiling" if _is_compiling(frame) else ""

    def interrupt(self, error: BaseException, code: int, frame: FrameType | None):
        """Raises an error that ends the program, or ends its process by a code.

        An error is lost where C++ has called Python, and one in the midst of importing
        an extension module crashes.
        """
        if any(
            x.f_code.co_filename.startswith("<frozen importlib") for x in _up(frame)
        ):
            end(code)
        self._last_resort = threading.Timer(PATIENCE, end, [code])
        self._last_resort.daemon = True
        self._last_resort.start()
        raise error

    def close(self) -> None:
        """Takes note that the program is over."""
        if self._last_resort is not None:
            self._last_resort.cancel()


def _is_compiling(frame: FrameType | None) -> bool:
    """Whether jax traces or compiles a program of the engine, or compiles any."""
    from syncalgos.programs import Programs  # imported long ago, where a program looks

    return any(
        x.f_code is Programs._compile.__code__
        or x.f_code.co_filename.endswith(COMPILER)
        for x in _up(frame)
    )


def _up(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and those that wait for it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def end(code: int) -> NoReturn:
    """Ends the process at once, whatever it does."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # the cursor, which a bar may have hidden
    os._exit(code)
