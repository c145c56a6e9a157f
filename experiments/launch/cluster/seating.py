"""Finds workers of a Dask cluster for a run's processes at each start."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.launch.addresses import joined_address
from experiments.launch.cluster.workers import Expected, Roster, Seat, host_of
from experiments.launch.supervisor.group import Log, Placement

if TYPE_CHECKING:
    from distributed import Client

PATIENCE = 2.0  # seconds for workers to answer before a line reports the wait


class Seating:
    """Assigns workers to the attempts of a run.

    Attributes:
        seats: the workers of the last attempt, by process.
        roster: the suitable workers.
    """

    def __init__(
        self, client: "Client", count: int, meant: Expected, out: Path, log: Log
    ):
        """Starts without workers.

        Args:
            client: connected to the scheduler.
            count: the number of processes.
            meant: the versions and code that workers must share with the command.
            out: the run's folder.
            log: shows the user a line.
        """
        self.seats: list[Seat] = []
        self.roster = Roster(client, meant, out, log)
        self._count = count
        self._out = out
        self._log = log
        self._waits: float | None = None  # time since which workers are missing
        self._said = ""  # the last line about missing workers
        self._asked_again = ""  # worker of process 0, asked again before the start

    def find(
        self, present: frozenset[str], idle: frozenset[str], now: float
    ) -> Placement | None:
        """Returns a place for each process, once there are enough workers.

        Args:
            present: the addresses of all workers.
            idle: the addresses of workers without tasks; other users may run tasks too.
            now: time.monotonic().
        """
        self.roster.update(present)
        self._waits = now if self._waits is None else self._waits
        is_late = now - self._waits > PATIENCE
        # Wait for workers about to answer, to spread processes evenly over hosts.
        if not is_late and (self.roster.asked or not present):
            return None
        free = {x: seat for x, seat in self.roster.seats.items() if x in idle}
        seats = choose(free, self._count, self.seats)
        if seats is None:
            missing = self._count - len(free)
            line = f"waiting for Dask workers: {missing} of {self._count} missing"
            if is_late and self._said != line:
                self._said = line
                self._log(line)
            return None
        if seats[0].address != self._asked_again:
            # This worker runs jax's service: its port may be in use by now.
            self._asked_again, self._waits = seats[0].address, now
            self.roster.forget(self._asked_again)
            return None
        self._asked_again = ""
        self.seats, self._waits, self._said = seats, None, ""
        hosts = [seat.host for seat in seats]
        apart = dict.fromkeys(seat.host[0] for seat in seats if not seat.sees_out)
        if apart:
            where = ", ".join(f"{host}:{self._out}" for host in apart)
            self._log(f"--out is not on a shared file system: files are in {where}")
        where = joined_address(host_of(seats[0].address), seats[0].port)
        return Placement(where, hosts)


def choose(
    free: Mapping[str, Seat], count: int, before: Sequence[Seat]
) -> list[Seat] | None:
    """Chooses a worker for each process.

    A process stays on its worker, or at least on its host, because its checkpoints may
    be there. The others are spread evenly over the hosts, neighbours together.

    Args:
        free: the free workers, by address.
        count: the number of processes.
        before: the workers of the last attempt; empty before the first.

    Returns:
        A worker for each process; None if there are too few.
    """
    if len(free) < count:
        return None
    left = dict(sorted(free.items()))
    seats = [left.pop(x.address, None) for x in before] or [None] * count
    missing = [i for i, seat in enumerate(seats) if seat is None]
    hosts = [before[i].host if before else None for i in range(count)]
    there = {seat.host for seat in left.values()}
    for i in sorted(missing, key=lambda i: hosts[i] not in there):
        taken = Counter(seat.host for seat in seats if seat)
        best = min(left.values(), key=lambda x: (x.host != hosts[i], taken[x.host]))
        seats[i] = left.pop(best.address)
    chosen = [seat for seat in seats if seat]
    if not before:
        # Hosts in the order of their first worker, each host's processes in a row.
        order = list(dict.fromkeys(seat.host for seat in chosen))
        chosen.sort(key=lambda seat: (order.index(seat.host), seat.address))
    return chosen
