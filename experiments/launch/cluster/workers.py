"""Asks Dask workers who they are, before they get work."""

import os
import platform
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.launch.cluster import inspection

if TYPE_CHECKING:
    from distributed import Client

PACKAGES = ("syncalgos", "experiments")  # whose code must be the same


class Expected(NamedTuple):
    """The command's own state, which its workers must share.

    Attributes:
        versions: of Python and the packages, by name.
        code: SHA-256 of the code of `PACKAGES`.
        own: digests of the user's own modules, by name; "" where there is no file, None
            where there is no module.
    """

    versions: dict[str, str]
    code: str
    own: dict[str, str | None]


class Seat(NamedTuple):
    """A worker's answer, by which it may run a process.

    Attributes:
        address: by which the scheduler knows it.
        host: name, boot and network of its machine, which together identify it.
        pid: process id.
        versions: as in `Expected`; "" for a package that is not installed.
        code: as in `Expected`; "" if it does not find the code.
        loaded: the same, of the code that it has imported.
        folder: the checkout in which it finds it.
        own: as in `Expected`.
        sees_out: whether the run's folder is the same as for the command.
        port: one that is free at its address; 0 where it has no address of its own.
    """

    address: str
    host: tuple[str, ...]
    pid: int
    versions: dict[str, str]
    code: str
    loaded: str
    folder: str
    own: dict[str, str | None]
    sees_out: bool
    port: int


def expected(versions: Mapping[str, str], names: tuple[str, ...]) -> Expected:
    """Returns the state of this process.

    Args:
        versions: of Python and the packages, as `training.versions` has them.
        names: of task and algorithm; those with a colon are the user's own.
    """
    # The library's version is part of its code.
    others = {name: text for name, text in versions.items() if name != "syncalgos"}
    own = sorted({name.partition(":")[0] for name in names if ":" in name})
    here = inspection.facts([], own, PACKAGES)
    return Expected(others, here["code"], here["own"])


def objection(seat: Seat, meant: Expected) -> str | None:
    """Reports why a worker cannot take part; None if it can."""
    if not seat.code:
        return (
            "it cannot import experiments: start it in the checkout by `python -m dask "
            "worker`, or with the checkout in PYTHONPATH"
        )
    for name, version in meant.versions.items():
        if (there := seat.versions.get(name, "")) != version:
            has = f"{name} {there}" if there else f"no {name}"
            return f"it has {has}, this command {version}"
    if seat.code != meant.code:
        return f"its code in {seat.folder} differs from this command's"
    if seat.loaded != seat.code:
        return f"its code in {seat.folder} has changed since: start it again"
    for name, digest in meant.own.items():
        if (module := seat.own.get(name)) is None:
            return f"it cannot import {name}: put it into PYTHONPATH there"
        if digest and module != digest:
            return f"its code of {name} differs from this command's"
    return None


def ask(client: "Client", address: str, meant: Expected, nonce: str) -> Seat:
    """Asks a worker, also one that is busy; returns once it has answered.

    Args:
        client: connected to the scheduler.
        address: of the worker.
        meant: names what is asked for.
        nonce: path of a file that may be seen there.

    Raises:
        Exception: of Dask or of the worker, of any kind.
    """
    import cloudpickle

    def run(function: Callable[..., Any], *words: Any) -> Any:
        answers: Any = client.run(function, *words, workers=[address])
        return answers[address]

    # Bytecode, which another Python may not read, follows only where it is the same.
    python = run(platform.python_version)
    if python != meant.versions.get("python", python):
        versions = {**meant.versions, "python": python}
        host, pid = (run(socket.gethostname),), run(os.getpid)
        return Seat(address, host, pid, versions, "?", "?", "", {}, False, 0)
    cloudpickle.register_pickle_by_value(inspection)
    words = [[*meant.versions], [*meant.own], PACKAGES, nonce, host_of(address)]
    return Seat(address, **run(inspection.facts, *words))


def host_of(address: str) -> str:
    """Returns the host of a Dask worker's address, without brackets."""
    return address.partition("://")[2].rpartition(":")[0].strip("[]")
