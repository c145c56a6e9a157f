"""Finds workers of a Dask cluster for the processes of a run, again at each start."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.launch.addresses import joined_address
from experiments.launch.cluster.member import report_port
from experiments.launch.cluster.roster import Roster
from experiments.launch.cluster.seats import Seat, choose
from experiments.launch.cluster.workers import Expected
from experiments.launch.supervisor.group import Log, numbered
from experiments.launch.supervisor.processes import Placement, Unplaced

if TYPE_CHECKING:
    from distributed import Client, Future

PATIENCE = 2.0  # seconds for workers to answer before the user hears that we wait
BUSY = 5.0  # seconds without an answer after which a worker counts as busy


class Request(NamedTuple):
    """The needs of a command, for which a cluster is asked.

    Attributes:
        scheduler: its address, for the user.
        processes: how many are wanted.
        argv: the flags of the command.
        out: the run's folder.
        meant: what the workers must share with the command.
    """

    scheduler: str
    processes: int
    argv: list[str]
    out: Path
    meant: Expected


@dataclass
class Choice:
    """The workers of the next attempt, which are asked whether they are still idle.

    Attributes:
        seats: a worker for each process.
        number: of the choice, which the answers have too.
        asked: the time of the questions.
        futures: of the questions.
        ports: the answers, by address: a free port at process 0's, else 0.
    """

    seats: list[Seat]
    number: int
    asked: float
    futures: list["Future"]
    ports: dict[str, int] = field(default_factory=dict)


class Seating:
    """The workers of a run's attempts.

    Attributes:
        seats: those of the last one, by process.
    """

    def __init__(self, client: "Client", topic: str, request: Request, log: Log):
        """Knows no worker yet.

        Args:
            client: connected to the scheduler.
            topic: of the workers' answers, which `take` takes.
            request: what is wanted.
            log: shows the user a line.
        """
        self.seats: list[Seat] = []
        self._client = client
        self._topic = topic
        self._request = request
        self._log = log
        self._roster = Roster(client, topic, request.meant, request.out, log)
        self._hosts = 0  # the number of hosts at the first attempt
        self._choice: Choice | None = None
        self._choices = 0
        self._waits: float | None = None  # since when workers are missing
        self._said = ""  # the last line about that
        self._said_folders: list[str] = []

    def find(self, present: frozenset[str], now: float) -> Placement | None:
        """Returns a place for each process, once there are enough workers.

        Args:
            present: the addresses of all workers.
            now: time.monotonic().

        Raises:
            Unplaced: a worker failed to answer, as where it has no free port.
        """
        self._roster.update(present)
        if self._waits is None:
            self._waits = now
        if self._choice is None:
            self._choose(present, now)
        elif self._is_void(self._choice, now):
            self._choice = None
        choice = self._choice
        if choice is None or len(choice.ports) < len(choice.seats):
            return None
        place = self._placement(choice.seats, choice.ports[choice.seats[0].address])
        self._choice, self._waits, self._said = None, None, ""
        return place

    def take(self, message: dict[str, Any]) -> None:
        """Takes the answer of a worker."""
        if "facts" in message:
            self._roster.take(message)
        elif self._choice is not None and message["choice"] == self._choice.number:
            self._choice.ports[message["address"]] = message["port"]

    def forget(self, address: str) -> None:
        """Has a worker asked again before it gets work."""
        self._roster.forget(address)

    def close(self) -> None:
        """Removes what was written for the workers to see."""
        self._roster.close()

    def _choose(self, present: frozenset[str], now: float) -> None:
        """Chooses workers, and asks whether they are idle, the first for a port."""
        is_late = self._waits is not None and now - self._waits > PATIENCE
        # Those that are about to answer count: processes lie evenly over the hosts.
        if not is_late and (self._roster.is_asking or not present):
            return
        free, count = self._roster.seats, self._request.processes
        seats = choose(free, count, self.seats)
        if seats is not None:
            self._choices += 1
            futures = [self._question(seat, seat is seats[0]) for seat in seats]
            self._choice = Choice(seats, self._choices, now, futures)
            return
        line = f"waiting for {count - len(free)} more of {count} workers"
        if is_late and self._said != line:
            self._said = line
            self._log(line)

    def _question(self, seat: Seat, is_first: bool) -> "Future":
        """Asks a worker whether it is idle: others' work may have come since."""
        host = host_of(seat.address) if is_first else ""
        words = (self._topic, self._choices, host)
        return self._client.submit(
            report_port, *words, workers=[seat.address], pure=False, retries=0
        )

    def _is_void(self, choice: Choice, now: float) -> bool:
        """Whether a worker has left, or is busy: then it counts once it is idle."""
        for seat, future in zip(choice.seats, choice.futures, strict=True):
            if future.status == "error":
                reason = future.exception()
                raise Unplaced(f"the Dask worker {seat.address} failed: {reason}")
        silent = {x.address for x in choice.seats} - choice.ports.keys()
        if silent and now - choice.asked > BUSY:
            for address in silent:
                self._roster.forget(address)
        is_there = all(seat.address in self._roster.seats for seat in choice.seats)
        is_lost = any(x.status in ("cancelled", "lost") for x in choice.futures)
        return not is_there or is_lost

    def _placement(self, seats: list[Seat], port: int) -> Placement:
        self.seats = seats
        self._say_folders()
        hosts = [seat.host for seat in seats]
        # Some algorithms' groups follow the number of hosts: a restart elsewhere must
        # not change the numbers.
        self._hosts = self._hosts or len(set(hosts))
        return Placement(
            joined_address(host_of(seats[0].address), port),
            self._hosts,
            numbered(hosts),
            [name for name, *_ in hosts],
        )

    def _say_folders(self) -> None:
        """Says on which hosts the run's files are, if not on this one."""
        apart = dict.fromkeys(seat.host[0] for seat in self.seats if not seat.sees_out)
        if apart and [*apart] != self._said_folders:
            where = ", ".join(f"{host}:{self._request.out}" for host in apart)
            self._log(f"--out is not shared with this machine: files are in {where}")
        self._said_folders = [*apart]


def host_of(address: str) -> str:
    """Returns the host of a Dask worker's address, without brackets."""
    return address.partition("://")[2].rpartition(":")[0].strip("[]")
