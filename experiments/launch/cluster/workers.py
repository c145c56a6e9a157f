"""The workers of a Dask cluster that may take part, each asked to identify itself."""

import platform
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.launch.cluster import inspection
from experiments.launch.supervisor.group import Log

if TYPE_CHECKING:
    from distributed import Client

PAUSE = 0.5  # seconds before a worker that could not be reached is asked again


class Expected(NamedTuple):
    """The command's own state, which its workers must share.

    Attributes:
        versions: of Python and the packages, by name.
        code: digests of our packages and of the user's own, by name.
    """

    versions: dict[str, str]
    code: dict[str, str | None]


class Seat(NamedTuple):
    """A worker's answer, by which it may run a process.

    Attributes:
        address: by which the scheduler knows it.
        host: name, boot and network of its machine, which together identify it.
        pid: process id.
        versions: as in `Expected`; "" for a package that is not installed.
        code: as in `Expected`; None for a module that it does not find.
        is_stale: whether it has imported other code of ours than it finds now.
        folder: the checkout in which it finds it.
        sees_out: whether the run's folder is the same as for the command.
        port: one that is free at its address; 0 where it has no address of its own.
    """

    address: str
    host: tuple[str, ...]
    pid: int
    versions: dict[str, str]
    code: dict[str, str | None]
    is_stale: bool
    folder: str
    sees_out: bool
    port: int


class Unfit(Exception):
    """A worker cannot take part; the message says which one, and why."""


def expected(versions: Mapping[str, str], names: tuple[str, ...]) -> Expected:
    """Returns the state of this process.

    Args:
        versions: of Python and the packages, as `training.versions` has them.
        names: of task and algorithm; those with a colon are the user's own.
    """
    # The library's version is part of its code.
    others = {name: text for name, text in versions.items() if name != "syncalgos"}
    own = {name.partition(":")[0].partition(".")[0] for name in names if ":" in name}
    modules = [*inspection.PACKAGES, *sorted(own)]
    return Expected(others, inspection.facts([], modules)["code"])


def objection(seat: Seat, meant: Expected) -> str | None:
    """Reports why a worker cannot take part; None if it can."""
    for name, version in meant.versions.items():
        if (there := seat.versions[name]) != version:
            has = f"{name} {there}" if there else f"no {name}"
            return f"it has {has}, this command {version}"
    for name, digest in meant.code.items():
        if (there := seat.code[name]) is None:
            return (
                f"it cannot import {name}: start it in its folder by `python -m dask "
                "worker`, or with the folder in PYTHONPATH"
            )
        if there != digest:
            place = f" in {seat.folder}" if name in inspection.PACKAGES else ""
            return f"its code of {name}{place} differs from this command's"
    if seat.is_stale:
        return f"its code in {seat.folder} has changed since it started: restart it"
    return None


def ask(client: "Client", address: str, meant: Expected, nonce: str) -> Seat:
    """Asks a worker, also one that is busy; returns once it has answered.

    Args:
        client: connected to the scheduler.
        address: of the worker.
        meant: what it must share.
        nonce: path of a file that may be seen there.

    Raises:
        Unfit: it cannot take part.
        Exception: of Dask or of the worker, of any kind.
    """
    import cloudpickle

    def run(function: Callable[..., Any], *words: Any) -> Any:
        answers: Any = client.run(function, *words, workers=[address])
        return answers[address]

    # Bytecode, which another Python may not read, follows only where it is the same.
    python = run(platform.python_version)
    if python != (own := meant.versions.get("python", python)):
        line = f"is refused: it has python {python}, this command {own}"
        raise Unfit(f"{address} {line}")
    cloudpickle.register_pickle_by_value(inspection)
    words = [[*meant.versions], [*meant.code], nonce, host_of(address)]
    seat = Seat(address, **run(inspection.facts, *words))
    if line := objection(seat, meant):
        raise Unfit(f"{address} (pid {seat.pid} on {seat.host[0]}) is refused: {line}")
    return seat


def host_of(address: str) -> str:
    """Returns the host of a Dask worker's address, without brackets."""
    return address.partition("://")[2].rpartition(":")[0].strip("[]")


class Roster:
    """The workers that were found fit.

    Attributes:
        seats: the fit ones, by address.
        asked: those that have not answered yet, by address.
    """

    def __init__(self, client: "Client", meant: Expected, out: Path, log: Log):
        """Starts without workers.

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
        self.asked: dict[str, Future[Seat]] = {}
        self._refused: set[str] = set()
        self._nonce: Path | None = None

    def update(self, present: Set[str]) -> None:
        """Takes answers, asks the new workers, and forgets those that have left."""
        for address in [x for x, answer in self.asked.items() if answer.done()]:
            self._take(address, self.asked.pop(address))
        # A worker may be started again at the address of the one that was refused.
        self._refused &= present
        for address in {*self.seats, *self.asked} - present:
            self.forget(address)
        for address in sorted(present - {*self.seats, *self.asked, *self._refused}):
            self.asked[address] = answer = Future()
            words = (address, str(self._hidden()), answer)
            # In a thread of its own, which a worker that is frozen would block.
            threading.Thread(target=self._ask, args=words, daemon=True).start()
        if not self.asked:
            self.close()

    def forget(self, address: str) -> None:
        """Forgets a worker, which is asked again if it is still present."""
        self.seats.pop(address, None)
        self.asked.pop(address, None)

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
        """Accepts a worker, or reports why it is refused."""
        error = answer.exception()
        if error is None:
            self.seats[address] = answer.result()
        elif not isinstance(error, OSError):  # else it has left, or is asked again
            line = f"{address} is refused: {error!r}"
            self._log(f"the Dask worker {error if isinstance(error, Unfit) else line}")
            self._refused.add(address)

    def _hidden(self) -> Path:
        """Writes the file in the nearest folder to the run's that there is."""
        if self._nonce is None:
            top = next(x for x in (self._out, *self._out.parents) if x.is_dir())
            self._nonce = top / f".syncalgos-{uuid.uuid4().hex}"
            with suppress(OSError):  # a folder that is not ours is not shared either
                self._nonce.touch()
        return self._nonce
