"""Asks the workers of a Dask cluster to identify themselves, and checks them."""

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
    """The versions and code of the command, which its workers must share.

    Attributes:
        versions: versions of Python and the packages, by name.
        code: digests of our packages and of custom modules, by name.
    """

    versions: dict[str, str]
    code: dict[str, str | None]


class Seat(NamedTuple):
    """The answer of a worker that may run a process.

    Attributes:
        address: the worker's address at the scheduler.
        host: name, boot and network of its machine, which together identify it.
        pid: process id.
        versions: versions as in `Expected`; "" for a package that is not installed.
        code: digests as in `Expected`; None for a module that is not found.
        is_stale: whether our code has changed since the worker imported it.
        folder: the checkout in which the worker finds our code.
        sees_out: whether worker and command see the same folder of the run.
        port: a free port at the worker's address; 0 if it has no network address.
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
    """Returns the versions and code of this process.

    Args:
        versions: versions of Python and the packages, from `training.versions`.
        names: names of task and algorithm; names with a colon are custom.
    """
    # The library's version is part of its code.
    others = {name: text for name, text in versions.items() if name != "syncalgos"}
    own = {name.partition(":")[0].partition(".")[0] for name in names if ":" in name}
    modules = [*inspection.PACKAGES, *sorted(own)]
    return Expected(others, inspection.facts([], modules)["code"])


def objection(seat: Seat, meant: Expected) -> str | None:
    """Reports why a worker cannot take part; returns None if it can."""
    for name, version in meant.versions.items():
        if (there := seat.versions[name]) != version:
            has = f"{name} {there}" if there else f"no {name}"
            return f"it has {has}, but this command has {version}"
    for name, digest in meant.code.items():
        if (there := seat.code[name]) is None:
            return (
                f"it cannot import {name}: start it by `python -m dask worker` in the "
                f"folder that contains {name}, or add that folder to PYTHONPATH"
            )
        if there != digest:
            place = f" in {seat.folder}" if name in inspection.PACKAGES else ""
            return f"its copy of {name}{place} differs from this command's copy"
    if seat.is_stale:
        return f"its code in {seat.folder} has changed since it started: restart it"
    return None


def ask(client: "Client", address: str, meant: Expected, nonce: str) -> Seat:
    """Asks a worker, even a busy one; returns once it has answered.

    Args:
        client: connected to the scheduler.
        address: the address of the worker.
        meant: the versions and code that the worker must share.
        nonce: path of a file that may be visible there.

    Raises:
        Unfit: the worker cannot take part.
        Exception: Dask or the worker raised an error of any kind.
    """
    import cloudpickle

    def run(function: Callable[..., Any], *words: Any) -> Any:
        answers: Any = client.run(function, *words, workers=[address])
        return answers[address]

    # Checked before sending bytecode, which another Python version may not read.
    python = run(platform.python_version)
    if python != (own := meant.versions.get("python", python)):
        line = f"is refused: it has python {python}, but this command has {own}"
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
    """The suitable workers of a cluster.

    Attributes:
        seats: the answers of suitable workers, by address.
        asked: pending answers of the other workers, by address.
    """

    def __init__(self, client: "Client", meant: Expected, out: Path, log: Log):
        """Starts without workers.

        Args:
            client: connected to the scheduler.
            meant: the versions and code that workers must share.
            out: the run's folder, which workers may share.
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
        """Handles answers, asks new workers, and forgets workers that have left."""
        for address in [x for x, answer in self.asked.items() if answer.done()]:
            self._take(address, self.asked.pop(address))
        # A new worker may start at the address of a refused one that has left.
        self._refused &= present
        for address in {*self.seats, *self.asked} - present:
            self.forget(address)
        for address in sorted(present - {*self.seats, *self.asked, *self._refused}):
            self.asked[address] = answer = Future()
            words = (address, str(self._hidden()), answer)
            # In a separate thread, because a frozen worker would block it.
            threading.Thread(target=self._ask, args=words, daemon=True).start()
        if not self.asked:
            self.close()

    def forget(self, address: str) -> None:
        """Forgets a worker; it is asked again if it is still present."""
        self.seats.pop(address, None)
        self.asked.pop(address, None)

    def close(self) -> None:
        """Removes the file that shows workers whether they share the folder."""
        if self._nonce is not None:
            with suppress(OSError):
                self._nonce.unlink()
        self._nonce = None

    def _ask(self, address: str, nonce: str, answer: "Future[Seat]") -> None:
        try:
            answer.set_result(ask(self._client, address, self._meant, nonce))
        except Exception as error:  # a worker may raise any kind of error
            time.sleep(PAUSE)
            answer.set_exception(error)

    def _take(self, address: str, answer: "Future[Seat]") -> None:
        """Accepts a worker, or reports why it is refused."""
        error = answer.exception()
        if error is None:
            self.seats[address] = answer.result()
        elif not isinstance(error, OSError):  # otherwise it has left or is asked again
            line = f"{address} is refused: {error!r}"
            self._log(f"the Dask worker {error if isinstance(error, Unfit) else line}")
            self._refused.add(address)

    def _hidden(self) -> Path:
        """Writes the file in the run's folder, or in its nearest existing parent."""
        if self._nonce is None:
            top = next(x for x in (self._out, *self._out.parents) if x.is_dir())
            self._nonce = top / f".syncalgos-{uuid.uuid4().hex}"
            with suppress(OSError):  # a read-only folder counts as not shared
                self._nonce.touch()
        return self._nonce
