"""Settings of the whole process that calls change, also calls in several threads."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, ExitStack


class Overlapping(ContextDecorator):
    """A block that several threads may be in at once, as if they were one.

    The first to enter sets up, and the last to leave restores, whatever their order.
    If each restored what it has found, a call that began inside another one would, in
    the end, bring back the settings of the other.

    Args:
        block: function that returns a context manager which sets up and restores.
    """

    def __init__(self, block: Callable[[], AbstractContextManager[None]]):
        self._block = block
        self._lock = threading.Lock()
        self._num_inside = 0
        self._setup = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._setup.enter_context(self._block())
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._setup.close()
