"""One process of a run, on the Dask worker that starts and watches it.

Imports no jax: a worker outlives many runs, whose processes start jax themselves.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.launch.addresses import free_port
from experiments.launch.supervisor.child import Child, Remote
from experiments.launch.supervisor.group import Rules
from experiments.launch.supervisor.process_status import ProcessStatus

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed import Worker

TICK = 0.05  # seconds between two looks
PACE = 0.25  # seconds between two reports of steps
BEAT = 1.0  # seconds between signs of life


class Order(NamedTuple):
    """The order to run a process, for a worker.

    Attributes:
        topic: of the messages to the command, which no other run has.
        serial: number of the start.
        argv: the flags of the command.
        attributes: of the process's `ChildSide`.
        folder: the checkout on the worker's host.
        rules: limits.
    """

    topic: str
    serial: int
    argv: list[str]
    attributes: dict[str, Any]
    folder: str
    rules: Rules


@dataclass
class Outbox:
    """Messages from a worker to the command, few and in order.

    Attributes:
        order: what the worker was asked to run.
        send: takes a message.
    """

    order: Order
    send: Callable[[dict[str, Any]], None]
    _lines: list[tuple[str, str]] = field(default_factory=list)
    _last: ProcessStatus | None = None
    _sent: float = 0.0  # the time of the last message

    def log(self, text: str) -> None:
        """Has the command print a line on stderr."""
        self._lines.append(("log", text))

    def out(self, text: str) -> None:
        """Has the command print a line on stdout."""
        self._lines.append(("out", text))

    def flush(self, status: ProcessStatus, now: float, is_over: bool = False) -> None:
        """Sends what is new, if it is time.

        Args:
            status: of the process.
            now: time.monotonic().
            is_over: whether the process has ended: this is the last message.
        """
        last = self._last
        is_step = last is not None and last._replace(step=status.step) == status
        pause = BEAT if status == last else PACE if is_step else 0.0
        if not (self._lines or is_over) and now - self._sent < pause:
            return
        message = {"serial": self.order.serial, "status": status._asdict()}
        self.send({**message, "lines": self._lines, "is_over": is_over})
        self._lines, self._last, self._sent = [], status, now


@dataclass
class Contact:
    """The last answer of the scheduler to a worker.

    Attributes:
        worker: the one that is answered.
        since: the time of the answer.
    """

    worker: "Worker"
    since: float
    _latency: float = -1.0

    def age(self, now: float) -> float:
        """Returns the seconds since the last answer, if it is called often."""
        # Dask measures it by each heartbeat, of which it keeps no time.
        if self.worker.latency != self._latency:
            self._latency, self.since = self.worker.latency, now
        return now - self.since


# The processes on this worker, by topic: signals for them come in another thread.
_RUNNING: dict[str, Child] = {}


def run_member(order: Order) -> None:
    """Runs one process of a run to its end; the task of a Dask worker."""
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()
    # What is cut off counts as lost after `loss`: its process must be gone by then, as
    # another one writes the same files.
    lease = 0.75 * order.rules.loss
    contact = Contact(worker, time.monotonic())
    outbox = Outbox(order, lambda message: worker.log_event(order.topic, message))
    child = Child(
        # -P: a user's own module is the one that the worker has found.
        [sys.executable, "-P", "-m", "experiments.run", *order.argv],
        order.attributes,
        order.attributes["process"] > 0,
        outbox.log,
        Remote(
            order.folder,
            outbox.out,
            lease,
            order.attributes.get("announced", {}).get("environ", {}),
        ),
    )
    _RUNNING[order.topic] = child
    try:
        while not child.is_over and is_wanted(worker, key):
            now = time.monotonic()
            if contact.age(now) > lease:
                break
            child.poll(now, order.rules)
            outbox.flush(child.status, now)
            time.sleep(TICK)
    finally:
        _RUNNING.pop(order.topic, None)
        is_cut = contact.age(time.monotonic()) > lease or not _is_open(worker)
        is_cut = is_cut and not child.is_over
        child.kill()
        child.reap()
        status = child.status
        if is_cut and not status.said:
            status = status._replace(said="lost", text=cut_line(worker.address))
        outbox.flush(status, time.monotonic(), is_over=True)


def cut_line(address: str) -> str:
    """Returns the reason for which a worker ends a process by itself."""
    return f"its Dask worker {address} closes, or has lost the scheduler"


def signal_member(topic: str, number: int) -> None:
    """Passes a signal on to the process of a run on this worker."""
    if (child := _RUNNING.get(topic)) is not None:
        child.signal(number)


def report_port(topic: str, choice: int, host: str) -> None:
    """Reports that this worker is idle, and a port that is free now.

    Args:
        topic: of the message.
        choice: number of the question.
        host: the address at which the port is free; "" where none is needed.
    """
    from distributed import get_worker

    worker, port = get_worker(), free_port(host) if host else 0
    message = {"choice": choice, "address": worker.address, "port": port}
    worker.log_event(topic, message)


def is_wanted(worker: "Worker", key: "Key") -> bool:
    """Whether the command of a task is still there, and wants it."""
    # The scheduler takes a task back when the command cancels it, ends or vanishes. A
    # worker that has lost the scheduler closes.
    task = worker.state.tasks.get(key)
    return _is_open(worker) and task is not None and task.state == "executing"


def _is_open(worker: "Worker") -> bool:
    return worker.status.name in ("running", "paused")
