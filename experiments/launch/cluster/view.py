"""Tracks the workers that join and leave a Dask cluster."""

import asyncio
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client

PACE = 0.25  # seconds between two queries
# A client that is closing or has lost the scheduler raises one of these.
ENDS = (
    AttributeError,
    OSError,
    RuntimeError,
    asyncio.CancelledError,
    futures.CancelledError,
)


class ClusterView:
    """The workers of a cluster, updated by a thread.

    A query to a frozen or unreachable scheduler blocks only this thread, never the
    readers of this object.

    Attributes:
        answered: the time of the last query that was answered.
        idle: the addresses of the workers without tasks.
    """

    def __init__(self, client: "Client", scheduler: str, loss: float):
        """Starts the thread.

        Args:
            client: connected to the scheduler.
            scheduler: the address of the scheduler, for messages.
            loss: seconds without an answer after which the scheduler counts as lost.
        """
        self._client = client
        self._scheduler = scheduler
        self._loss = loss
        self.answered = time.monotonic()
        self.idle: frozenset[str] = frozenset()
        self._threads: dict[str, int] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    @property
    def workers(self) -> frozenset[str]:
        """The addresses of the workers."""
        return frozenset(self._threads)

    def threads(self, address: str) -> int:
        """Returns the number of tasks that a worker runs at the same time."""
        return self._threads.get(address, 1)

    @property
    def lost(self) -> str | None:
        """The reason why the scheduler counts as lost; None while it answers."""
        if self._client.status != "running":
            return f"the Dask scheduler {self._scheduler} is lost"
        if time.monotonic() - self.answered > self._loss:
            return (
                f"the Dask scheduler {self._scheduler} gave no sign of life for "
                f"{self._loss:g} s"
            )
        return None

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(PACE) and self._client.status == "running":
            asked = time.monotonic()
            try:
                # Not `scheduler_info`, which returns a cache that Dask's own thread
                # empties of workers every few seconds.
                threads: Any = self._client.nthreads()
                processing: Any = self._client.processing()
            except ENDS:  # `lost` reports it unless we are closing
                continue
            self.idle = frozenset(x for x, tasks in processing.items() if not tasks)
            self._threads, self.answered = dict(threads), asked
