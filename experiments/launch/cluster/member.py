"""Runs one process of a run on a Dask worker.

This file imports no jax: a worker outlives many runs, whose processes start jax.
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

TICK = 0.1  # seconds between two polls
BEAT = 1.0  # seconds between signs of life


class Outbox:
    """Sends messages from a worker to the command, few and in order.

    Attributes:
        lines: lines for the command to show, each with its stream, "out" or "log".
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]):
        """Starts without lines; `send` sends a message."""
        self.lines: list[tuple[str, str]] = []
        self._send = send
        self._last: tuple[ProcessStatus | None, float] = None, 0.0  # and the time

    def flush(self, status: ProcessStatus, is_over: bool = False) -> None:
        """Sends new lines or a new status, or a sign of life if one is due.

        Args:
            status: the status of the process.
            is_over: whether the process has ended; this is then the last message.
        """
        now, (last, sent) = time.monotonic(), self._last
        if self.lines or is_over or status != last or now - sent >= BEAT:
            message = {"status": status._asdict(), "lines": self.lines}
            self._send({**message, "is_over": is_over})
            self.lines, self._last = [], (status, now)


class Contact:
    """Tracks the last answer of the scheduler to a worker."""

    def __init__(self, worker: "Worker"):
        """Counts from now, as if the scheduler had just answered."""
        self._worker, self._since, self._latency = worker, time.monotonic(), -1.0

    def age(self) -> float:
        """Returns the seconds since the last answer; call it often."""
        # Dask updates the latency at each heartbeat but does not store the time.
        if self._worker.latency != self._latency:
            self._latency, self._since = self._worker.latency, time.monotonic()
        return time.monotonic() - self._since


# The processes on this worker, by topic. Signals for them arrive in another thread.
_RUNNING: dict[str, Child] = {}


def run_member(
    topic: str,
    serial: int,
    argv: list[str],
    attributes: dict[str, Any],
    folder: str,
    limits: Limits,
) -> None:
    """Runs one process of a run to its end, as a task of a Dask worker.

    Args:
        topic: topic of the messages to the command, unique to the run.
        serial: number of the start.
        argv: the flags of the command.
        attributes: the attributes of the process's `ChildSide`.
        folder: the checkout on the worker's host.
        limits: limits on waiting and restarts.
    """
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()
    # A worker that is cut off counts as lost after `lost_after` seconds. Its process
    # must be gone by then, because another one will write the same files.
    lease = 0.75 * limits.lost_after
    contact = Contact(worker)
    outbox = Outbox(lambda text: worker.log_event(topic, {"serial": serial, **text}))
    environ = attributes.get("announced", {}).get("environ", {})

    def show(text: str) -> None:
        outbox.lines.append(("out", text))

    child = _RUNNING[topic] = Child(
        # -P: imports the same custom module that the worker has found.
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
    """Returns the reason that a worker gives when it ends a process by itself."""
    return f"its Dask worker {address} is closing or has lost the scheduler"


def signal_member(topic: str, number: int) -> None:
    """Passes a signal on to the process of a run on this worker."""
    if (child := _RUNNING.get(topic)) is not None:
        child.signal(number)


def is_wanted(worker: "Worker", key: "Key") -> bool:
    """Whether the command of a task still exists and wants the task."""
    # The scheduler withdraws a task when the command cancels it, ends or disappears. A
    # worker that has lost the scheduler closes.
    task = worker.state.tasks.get(key)
    return _is_open(worker) and task is not None and task.state == "executing"


def _is_open(worker: "Worker") -> bool:
    return worker.status.name in ("running", "paused")
