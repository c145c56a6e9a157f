"""The processes of a run on the workers of a Dask cluster."""

import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.cli.exits import printable
from experiments.launch.cluster.member import (
    Order,
    cut_line,
    run_member,
    signal_member,
)
from experiments.launch.cluster.seating import Request, Seating
from experiments.launch.cluster.view import ENDS, ClusterView
from experiments.launch.supervisor.group import Log, Rules, Start
from experiments.launch.supervisor.process_status import ProcessStatus
from experiments.launch.supervisor.processes import Placement, Unplaced

if TYPE_CHECKING:
    from distributed import Client, Future

UNBORN = 3.0  # seconds in which a task that was never heard of would have begun
TICK = 0.02  # seconds between two looks while processes are killed


@dataclass
class Member:
    """A process on a worker, as this command knows it.

    Attributes:
        address: of the worker.
        future: of the task that runs it.
        status: as the worker reported it last.
        heard: the time of its last message, or of the start.
        is_known: whether there was a message.
        is_over: whether it has ended.
    """

    address: str
    future: "Future"
    status: ProcessStatus
    heard: float
    is_known: bool = False
    is_over: bool = False


class ClusterProcesses:
    """Processes on the workers of a Dask cluster; see `Processes`."""

    def __init__(self, client: "Client", request: Request, rules: Rules, log: Log):
        """Starts to look at the cluster.

        Args:
            client: connected to the scheduler; `close` closes it.
            request: what is wanted.
            rules: limits.
            log: shows the user a line.
        """
        self._client = client
        self._request = request
        self._rules = rules
        self._log = log
        self._topic = f"syncalgos-{uuid.uuid4().hex}"
        self._view = ClusterView(client, request.scheduler, rules.loss)
        self._seating = Seating(client, self._topic, request, log)
        self._members: dict[int, Member] = {}
        self._serial = 0  # of the last start
        self._since = time.monotonic()  # the last attempt ended
        # Dask calls the handler in a thread of its own.
        self._inbox: deque[dict[str, Any]] = deque()
        client.subscribe_topic(self._topic, lambda event: self._inbox.append(event[1]))

    def gather(self, now: float) -> Placement | None:
        """Finds a fit worker for each process; see `Processes.gather`.

        There is no limit of time: clusters may take hours to grow.
        """
        if line := self._view.lost:
            raise Unplaced(line)
        # A worker whose end has ended an attempt must not be taken for the next one.
        if self._view.answered < self._since:
            return None
        return self._seating.find(self._view.workers, now)

    def start(self, start: Start) -> None:
        """Starts a process on each of the workers that were found."""
        now = time.monotonic()
        self._serial = start.serial
        given = start.attributes(self._rules.init_timeout)
        for seat, attributes in zip(self._seating.seats, given, strict=True):
            order = Order(
                self._topic,
                start.serial,
                self._request.argv,
                attributes,
                seat.folder,
                self._rules,
            )
            future = self._client.submit(
                run_member, order, workers=[seat.address], pure=False, retries=0
            )
            process = attributes["process"]
            status = ProcessStatus(process, 0)
            self._members[process] = Member(seat.address, future, status, now)

    def poll(self, now: float) -> None:
        """Takes the messages of the workers."""
        while self._inbox:
            self._take(self._inbox.popleft(), now)
        for member in self._members.values():
            if member.future.status == "error" and not member.is_over:
                text = f"its Dask worker failed: {member.future.exception()!r}"
                member.status = member.status._replace(
                    code=1, said="refused", text=text
                )
                member.is_over = True

    def statuses(self) -> list[ProcessStatus]:
        """The status of each process."""
        return [member.status for member in self._members.values()]

    def gone(self) -> dict[int, str]:
        """Processes whose worker is lost; see `Processes.gone`."""
        if line := self._view.lost:
            raise Unplaced(line)
        found = {i: self._lost(member) for i, member in self._members.items()}
        return {i: reason for i, reason in found.items() if reason is not None}

    def signal(self, number: int) -> None:
        """Passes a signal on to each process."""
        left = [m.address for m in self._members.values() if not m.is_over]
        # In a thread: a frozen worker would block it.
        threading.Thread(target=self._pass_on, args=(number, left), daemon=True).start()

    def kill(self) -> None:
        """Kills all processes; returns once each is gone, or its worker is."""
        # Process 0 last: it runs jax's service, without which the others abort.
        first = [member for i, member in self._members.items() if i == 0]
        others = [member for i, member in self._members.items() if i > 0]
        for members in (others, first):
            self._release(members)
        for member in self._members.values():
            # A worker that closes is there a while longer.
            is_cut = member.status.text == cut_line(member.address)
            if is_cut or self._lost(member):
                self._seating.forget(member.address)
        self._members = {}
        self._since = time.monotonic()

    def close(self) -> None:
        """Closes the connection."""
        self._seating.close()
        self._view.close()
        self._client.close(timeout=2)

    def _pass_on(self, number: int, workers: list[str]) -> None:
        words = (signal_member, self._topic, number)
        with suppress(*ENDS):  # the loss of the scheduler ends the run
            self._client.run(*words, workers=workers, on_error="ignore")

    def _take(self, message: dict[str, Any], now: float) -> None:
        """Takes a message of a worker."""
        if "serial" not in message:
            self._seating.take(message)
        elif message["serial"] == self._serial:
            self._show(message["lines"])
            status = ProcessStatus(**message["status"])
            if (member := self._members.get(status.process)) is not None:
                member.status, member.heard = status, now
                member.is_known, member.is_over = True, message["is_over"]

    def _show(self, lines: Sequence[tuple[str, str]]) -> None:
        for kind, text in lines:
            if kind == "out":
                print(printable(text), file=sys.stdout, flush=True)
            else:
                self._log(text)

    def _lost(self, member: Member) -> str | None:
        """Why a process's worker counts as lost; None while it does not."""
        limit = self._rules.loss
        if not member.is_known:
            limit = max(limit, self._rules.init_timeout)
        if member.is_over:
            return None
        if line := self._view.lost:
            return line
        name = f"its Dask worker {member.address}"
        if member.address not in self._view.workers:
            return f"{name} left"
        if time.monotonic() - member.heard > limit:
            return f"{name} gave no sign of life for {limit:g} s"
        return None

    def _release(self, members: list[Member]) -> None:
        """Gives tasks back, which ends their processes, and waits until it has."""
        began = time.monotonic()
        for member in members:
            member.future.release()
        while any(self._lingers(member, began) for member in members):
            time.sleep(TICK)
            self.poll(time.monotonic())

    def _lingers(self, member: Member, released: float) -> bool:
        """Whether a process may still run after its task was given back."""
        waited = time.monotonic() - released
        is_unborn = not member.is_known and waited > UNBORN
        return not (member.is_over or is_unborn or self._lost(member))
