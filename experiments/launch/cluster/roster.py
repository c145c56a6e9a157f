"""The Dask workers that may run processes: each is asked who it is, once."""

import uuid
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.launch.cluster.seats import Seat
from experiments.launch.cluster.workers import (
    Expected,
    WorkerFacts,
    inspection,
    objection,
)
from experiments.launch.supervisor.group import Log

if TYPE_CHECKING:
    from distributed import Client, Future


class Roster:
    """The workers that were found fit.

    Attributes:
        seats: the fit ones, by address.
    """

    def __init__(
        self, client: "Client", topic: str, meant: Expected, out: Path, log: Log
    ):
        """Knows nobody yet.

        Args:
            client: connected to the scheduler.
            topic: of the answers, which `take` takes.
            meant: what the workers must share.
            out: the run's folder, which they may share.
            log: shows the user a line.
        """
        self.seats: dict[str, Seat] = {}
        self._client = client
        self._topic = topic
        self._meant = meant
        self._out = out
        self._log = log
        self._asked: dict[str, Future] = {}
        self._refused: set[str] = set()
        self._nonce: Path | None = None

    def update(self, present: Set[str]) -> None:
        """Asks the new ones, and forgets those that have left."""
        # A worker may be started again at the address of the one that was refused.
        self._refused &= present
        for address in {*self.seats, *self._asked} - present:
            self.forget(address)
        for address, future in [*self._asked.items()]:
            if future.status == "error":
                self._refuse(address, address, repr(future.exception()))
            elif future.status in ("cancelled", "lost"):
                self.forget(address)
        for address in sorted(present - {*self.seats, *self._asked, *self._refused}):
            job = inspection(self._meant, str(self._hidden()), self._topic)
            self._asked[address] = self._client.submit(
                *job, workers=[address], pure=False, retries=0
            )

    def take(self, message: dict[str, Any]) -> None:
        """Takes the answer of a worker."""
        address = message["address"]
        if address not in self._asked:
            return
        facts = WorkerFacts(**message["facts"])
        facts = facts._replace(host=tuple(facts.host))
        line = objection(facts, self._meant)
        if line is None:
            seat = Seat(address, facts.host, facts.folder, facts.sees)
            self.seats[address] = seat
        else:
            self._refuse(
                address, f"{address} (pid {facts.pid} on {facts.host[0]})", line
            )
        self._asked.pop(address, None)
        if not self._asked:
            self.close()

    @property
    def is_asking(self) -> bool:
        """Whether some workers have not answered yet."""
        return bool(self._asked)

    def forget(self, address: str) -> None:
        """Has a worker asked again, if it is there."""
        self.seats.pop(address, None)
        self._asked.pop(address, None)

    def close(self) -> None:
        """Removes the file by which workers find whether they share the folder."""
        if self._nonce is not None:
            with suppress(OSError):
                self._nonce.unlink()
        self._nonce = None

    def _refuse(self, address: str, name: str, line: str) -> None:
        self._log(f"the Dask worker {name} is refused: {line}")
        self._asked.pop(address, None)
        self._refused.add(address)

    def _hidden(self) -> Path:
        """Writes the file in the nearest folder to the run's that there is."""
        if self._nonce is None:
            top = next(x for x in (self._out, *self._out.parents) if x.is_dir())
            self._nonce = top / f".syncalgos-{uuid.uuid4().hex}"
            with suppress(OSError):  # a folder that is not ours is not shared either
                self._nonce.touch()
        return self._nonce
