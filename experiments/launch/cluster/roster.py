"""The Dask workers that may run processes: each is asked who it is."""

import threading
import time
import uuid
from collections.abc import Set
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.launch.cluster.workers import Expected, Seat, ask, objection
from experiments.launch.supervisor.group import Log

if TYPE_CHECKING:
    from distributed import Client

PAUSE = 0.5  # seconds before a worker that could not be reached is asked again


class Roster:
    """The workers that were found fit.

    Attributes:
        seats: the fit ones, by address.
    """

    def __init__(self, client: "Client", meant: Expected, out: Path, log: Log):
        """Knows nobody yet.

        Args:
            client: connected to the scheduler.
            meant: what the workers must share.
            out: the run's folder, which they may share.
            log: shows the user a line.
        """
        self.seats: dict[str, Seat] = {}
        self._client = client
        self._meant = meant
        self._out = out
        self._log = log
        self._asked: dict[str, Future[Seat]] = {}
        self._refused: set[str] = set()
        self._nonce: Path | None = None

    def update(self, present: Set[str]) -> None:
        """Takes answers, asks the new workers, and forgets those that have left."""
        for address in [x for x, answer in self._asked.items() if answer.done()]:
            self._take(address, self._asked.pop(address))
        # A worker may be started again at the address of the one that was refused.
        self._refused &= present
        for address in {*self.seats, *self._asked} - present:
            self.forget(address)
        for address in sorted(present - {*self.seats, *self._asked, *self._refused}):
            self._asked[address] = answer = Future()
            words = (address, str(self._hidden()), answer)
            # In a thread of its own, which a worker that is frozen would block.
            threading.Thread(target=self._ask, args=words, daemon=True).start()
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

    def _ask(self, address: str, nonce: str, answer: "Future[Seat]") -> None:
        try:
            answer.set_result(ask(self._client, address, self._meant, nonce))
        except Exception as error:  # the worker's own may be of any kind
            time.sleep(PAUSE)
            answer.set_exception(error)

    def _take(self, address: str, answer: "Future[Seat]") -> None:
        """Lets a worker in, or names what is wrong with it."""
        if isinstance(error := answer.exception(), OSError):
            return  # it has left, or is asked again
        if error is not None:
            name, line = address, repr(error)
        else:
            seat = answer.result()
            name = f"{address} (pid {seat.pid} on {seat.host[0]})"
            line = objection(seat, self._meant)
            if line is None:
                self.seats[address] = seat
                return
        self._log(f"the Dask worker {name} is refused: {line}")
        self._refused.add(address)

    def _hidden(self) -> Path:
        """Writes the file in the nearest folder to the run's that there is."""
        if self._nonce is None:
            top = next(x for x in (self._out, *self._out.parents) if x.is_dir())
            self._nonce = top / f".syncalgos-{uuid.uuid4().hex}"
            with suppress(OSError):  # a folder that is not ours is not shared either
                self._nonce.touch()
        return self._nonce
