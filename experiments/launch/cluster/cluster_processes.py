"""The processes of a run on the workers of a Dask cluster."""

import sys
import threading
import time
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.cli.exits import printable
from experiments.launch.cluster.connection import connect
from experiments.launch.cluster.member import cut_line, run_member, signal_member
from experiments.launch.cluster.seating import Seating
from experiments.launch.cluster.view import ENDS, ClusterView
from experiments.launch.cluster.workers import expected
from experiments.launch.supervisor.group import Log, Placement, Unplaced
from experiments.launch.supervisor.limits import Limits
from experiments.launch.supervisor.process_status import ProcessStatus
from experiments.training.config import RunConfig
from experiments.training.versions import versions

if TYPE_CHECKING:
    from distributed import Future

UNBORN = 3.0  # seconds without a message after which a task counts as not started
TICK = 0.02  # seconds between two checks while processes are killed


@dataclass
class Member:
    """The state of a process on a worker, as this command knows it.

    Attributes:
        address: the address of the worker.
        future: the future of the task that runs the process.
        status: the last status that the worker reported.
        heard: the time of the last message, or of the start.
        is_over: whether the process has ended.
    """

    address: str
    future: "Future"
    status: ProcessStatus
    heard: float
    is_over: bool = False

    @property
    def is_known(self) -> bool:
        """Whether a message about the process has arrived."""
        return self.status.pid > 0


class ClusterProcesses:
    """Processes on the workers of a Dask cluster; see `Processes`."""

    def __init__(
        self, config: RunConfig, argv: list[str], out: Path, limits: Limits, log: Log
    ):
        """Connects to the scheduler, and starts to watch the cluster.

        Args:
            config: the config of the run, with a scheduler.
            argv: the flags as given.
            out: the run's folder.
            limits: limits on waiting and restarts.
            log: shows the user a line.

        Raises:
            BadRequest: Dask is not installed, or the address is invalid.
            Unreachable: no scheduler answers.
        """
        assert config.scheduler is not None  # as the caller has checked
        self._client = client = connect(config.scheduler, limits.init_timeout)
        meant = expected(versions(), (config.algo, config.task))
        self._argv = argv
        self._limits = limits
        self._log = log
        self._topic = f"syncalgos-{uuid.uuid4().hex}"
        self._view = ClusterView(client, config.scheduler, limits.lost_after)
        self._seating = Seating(client, config.processes, meant, out, log)
        self._members: list[Member] = []
        self._serial = 0  # the number of the last start
        self._since = time.monotonic()  # time at which the last attempt ended
        # Dask calls the handler in a thread of its own.
        self._inbox: deque[dict[str, Any]] = deque()
        client.subscribe_topic(self._topic, lambda event: self._inbox.append(event[1]))

    def gather(self, now: float) -> Placement | None:
        """Finds a suitable worker for each process; see `Processes.gather`.

        There is no time limit: clusters may take hours to grow.
        """
        if line := self._view.lost:
            raise Unplaced(line)
        # The loss of a worker may have ended the last attempt: use only answers of the
        # scheduler that are newer, as older ones may still list that worker.
        if self._view.answered < self._since:
            return None
        return self._seating.find(self._view.workers, self._view.idle, now)

    def start(self, attributes: list[dict[str, Any]]) -> None:
        """Starts a process on each of the workers that were found."""
        self._serial += 1  # messages with an earlier number are stale
        for seat, given in zip(self._seating.seats, attributes, strict=True):
            place = given, seat.folder, self._limits
            order = (self._topic, self._serial, self._argv, *place)
            future = self._client.submit(
                run_member, *order, workers=[seat.address], pure=False, retries=0
            )
            status, now = ProcessStatus(given["process"], 0), time.monotonic()
            self._members.append(Member(seat.address, future, status, now))

    def poll(self, now: float) -> list[ProcessStatus]:
        """Processes the messages of the workers; see `Processes.poll`."""
        self._listen(now)
        if line := self._view.lost:
            raise Unplaced(line)
        for member in self._members:
            if member.future.status == "error" and not member.is_over:
                text = f"its Dask worker failed: {member.future.exception()!r}"
                member.status = member.status._replace(
                    code=1, said="refused", text=text
                )
                member.is_over = True
            member.status = member.status._replace(gone=self._lost(member))
        return [member.status for member in self._members]

    def signal(self, number: int) -> None:
        """Passes a signal on to each process."""
        left = [member.address for member in self._members if not member.is_over]

        def pass_on() -> None:
            words = (signal_member, self._topic, number)
            with suppress(*ENDS):  # the loss of the scheduler ends the run
                self._client.run(*words, workers=left, on_error="ignore")

        # In a thread, because a frozen worker would block the call.
        threading.Thread(target=pass_on, daemon=True).start()

    def kill(self) -> None:
        """Kills all processes; returns once each process or its worker is gone."""
        # Process 0 last: it runs jax's service, without which the others abort.
        for members in (self._members[1:], self._members[:1]):
            began = time.monotonic()
            for member in members:
                member.future.release()  # ends its process
            while any(self._lingers(member, began) for member in members):
                time.sleep(TICK)
                self._listen(time.monotonic())
        for member in self._members:
            # A closing worker stays listed for a while.
            is_cut = member.status.text == cut_line(member.address)
            if is_cut or self._lost(member):
                self._seating.roster.forget(member.address)
        self._members = []
        self._since = time.monotonic()

    def close(self) -> None:
        """Kills all processes, and closes the connection."""
        self.kill()
        self._seating.roster.close()
        self._view.close()
        self._client.close(timeout=2)

    def _listen(self, now: float) -> None:
        """Processes the workers' messages, except those of an earlier start."""
        while self._inbox:
            message = self._inbox.popleft()
            if message["serial"] == self._serial:
                self._take(message, now)

    def _take(self, message: dict[str, Any], now: float) -> None:
        for kind, text in message["lines"]:
            if kind == "out":
                print(printable(text), file=sys.stdout, flush=True)
            else:
                self._log(text)
        status = ProcessStatus(**message["status"])
        if self._members:  # else the attempt is over
            member = self._members[status.process]
            member.status, member.heard = status, now
            member.is_over = message["is_over"]

    def _lost(self, member: Member) -> str:
        """The reason why a process's worker counts as lost; "" if it does not."""
        if member.is_over:
            return ""
        if line := self._view.lost:
            return line
        limit = self._limits.lost_after
        if not member.is_known:
            limit = max(limit, self._limits.init_timeout)
        name = f"its Dask worker {member.address}"
        if member.address not in self._view.workers:
            return f"{name} left"
        if time.monotonic() - member.heard > limit:
            return f"{name} gave no sign of life for {limit:g} s"
        return ""

    def _lingers(self, member: Member, released: float) -> bool:
        """Whether a process may still run after its task was released."""
        waited = time.monotonic() - released
        is_unborn = not member.is_known and waited > UNBORN
        return not (member.is_over or is_unborn or self._lost(member))
