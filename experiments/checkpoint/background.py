"""A thread that does one piece of work at a time while training continues."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A thread for what a run need not wait for; a `with` ends when its work is done.

    So an error of the run costs no checkpoint that was begun before it.
    """

    def __init__(self):
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown()

    def start(self, work: Callable[[], None]) -> None:
        """Starts work when what was started before has ended."""
        self.wait()
        self._last = self._pool.submit(work)

    def wait(self) -> None:
        """Waits until all is done; raises what the work raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
