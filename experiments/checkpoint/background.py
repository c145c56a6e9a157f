"""A thread that does one piece of work at a time while training continues."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A thread for work beside a run; a `with` block ends when this work is done.

    This way an error of the run does not interrupt a checkpoint that is being written.
    """

    def __init__(self):
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown()

    def start(self, work: Callable[[], None]) -> None:
        """Starts work once the earlier work has ended."""
        self.wait()
        self._last = self._pool.submit(work)

    def wait(self) -> None:
        """Waits until the work is done, and raises its error if there was one."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
