"""One process of a run, on the Dask worker that starts and watches it.

Imports no jax: a worker outlives many runs, whose processes start jax themselves.
"""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from experiments.launch.supervisor.child import Child, Remote
from experiments.launch.supervisor.limits import Limits
from experiments.launch.supervisor.process_status import ProcessStatus

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed import Worker

TICK = 0.1  # seconds between two looks
BEAT = 1.0  # seconds between signs of life


class Outbox:
    """Messages from a worker to the command, few and in order.

    Attributes:
        lines: that the command shall show, each with its stream: "out" or "log".
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]):
        """Takes what sends a message."""
        self.lines: list[tuple[str, str]] = []
        self._send = send
        self._last: tuple[ProcessStatus | None, float] = None, 0.0  # and when it was

    def flush(self, status: ProcessStatus, is_over: bool = False) -> None:
        """Sends what is new, or a sign of life if it is time.

        Args:
            status: of the process.
            is_over: whether the process has ended: this is the last message.
        """
        now, (last, sent) = time.monotonic(), self._last
        if self.lines or is_over or status != last or now - sent >= BEAT:
            message = {"status": status._asdict(), "lines": self.lines}
            self._send({**message, "is_over": is_over})
            self.lines, self._last = [], (status, now)


class Contact:
    """The last answer of the scheduler to a worker."""

    def __init__(self, worker: "Worker"):
        """The worker has just been answered."""
        self._worker, self._since, self._latency = worker, time.monotonic(), -1.0

    def age(self) -> float:
        """Returns the seconds since the last answer, if it is called often."""
        # Dask measures it by each heartbeat, of which it keeps no time.
        if self._worker.latency != self._latency:
            self._latency, self._since = self._worker.latency, time.monotonic()
        return time.monotonic() - self._since


# The processes on this worker, by topic: signals for them come in another thread.
_RUNNING: dict[str, Child] = {}


def run_member(
    topic: str,
    serial: int,
    argv: list[str],
    attributes: dict[str, Any],
    folder: str,
    limits: Limits,
) -> None:
    """Runs one process of a run to its end; the task of a Dask worker.

    Args:
        topic: of the messages to the command, which no other run has.
        serial: number of the start.
        argv: the flags of the command.
        attributes: of the process's `ChildSide`.
        folder: the checkout on the worker's host.
        limits: limits.
    """
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()
    # What is cut off counts as lost after `loss`: its process must be gone by then, as
    # another one writes the same files.
    lease = 0.75 * limits.lost_after
    contact = Contact(worker)
    outbox = Outbox(lambda text: worker.log_event(topic, {"serial": serial, **text}))
    environ = attributes.get("announced", {}).get("environ", {})

    def show(text: str) -> None:
        outbox.lines.append(("out", text))

    child = _RUNNING[topic] = Child(
        # -P: a user's own module is the one that the worker has found.
        [sys.executable, "-P", "-m", "experiments.run", *argv],
        attributes,
        lambda text: outbox.lines.append(("log", text)),
        Remote(folder, show, lease, environ),
    )
    try:
        while not child.is_over and is_wanted(worker, key) and contact.age() <= lease:
            child.poll(time.monotonic(), limits)
            outbox.flush(child.status)
            time.sleep(TICK)
    finally:
        _RUNNING.pop(topic, None)
        is_cut = not child.is_over and (contact.age() > lease or not _is_open(worker))
        child.kill()
        child.reap()
        status = child.status
        if is_cut and not status.said:
            status = status._replace(said="lost", text=cut_line(worker.address))
        outbox.flush(status, is_over=True)


def cut_line(address: str) -> str:
    """Returns the reason for which a worker ends a process by itself."""
    return f"its Dask worker {address} closes, or has lost the scheduler"


def signal_member(topic: str, number: int) -> None:
    """Passes a signal on to the process of a run on this worker."""
    if (child := _RUNNING.get(topic)) is not None:
        child.signal(number)


def is_wanted(worker: "Worker", key: "Key") -> bool:
    """Whether the command of a task is still there, and wants it."""
    # The scheduler takes a task back when the command cancels it, ends or vanishes. A
    # worker that has lost the scheduler closes.
    task = worker.state.tasks.get(key)
    return _is_open(worker) and task is not None and task.state == "executing"


def _is_open(worker: "Worker") -> bool:
    return worker.status.name in ("running", "paused")
