"""Asks Dask workers who they are, before they get work."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.launch.cluster import inspection as inspecting

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


class WorkerFacts(NamedTuple):
    """A worker's answer.

    Attributes:
        host: name, boot and network of its machine, which together identify it.
        pid: process id.
        versions: as in `Expected`; "" for a package that is not installed.
        code: as in `Expected`; "" if it does not find the code.
        loaded: the same, of the code that it has imported.
        folder: the checkout in which it finds it.
        own: as in `Expected`.
        sees: whether it sees the file whose path it was given.
    """

    host: tuple[str, ...]
    pid: int
    versions: dict[str, str]
    code: str
    loaded: str
    folder: str
    own: dict[str, str | None]
    sees: bool


def expected(versions: Mapping[str, str], names: tuple[str, ...]) -> Expected:
    """Returns the state of this process.

    Args:
        versions: of Python and the packages, as `prepared.versions` has them.
        names: of task and algorithm; those with a colon are the user's own.
    """
    # The library's version is part of its code.
    kept = {name: text for name, text in versions.items() if name != "syncalgos"}
    own = sorted({name.partition(":")[0] for name in names if ":" in name})
    unknown = Expected(kept, "", dict.fromkeys(own))
    found = inspecting.facts(**_wanted(unknown, ""))
    return unknown._replace(code=found["code"], own=found["own"])


def objection(facts: WorkerFacts, meant: Expected) -> str | None:
    """Reports why a worker cannot take part; None if it can."""
    if not facts.code:
        return (
            "it cannot import experiments: start it in the checkout by `python -m dask "
            "worker`, or with the checkout in PYTHONPATH"
        )
    for name, version in meant.versions.items():
        if (found := facts.versions.get(name, "")) != version:
            has = f"{name} {found}" if found else f"no {name}"
            return f"it has {has}, this command {version}"
    if facts.code != meant.code:
        return f"its code in {facts.folder} differs from this command's"
    if facts.loaded != facts.code:
        return f"its code in {facts.folder} has changed since: start it again"
    for name, digest in meant.own.items():
        if (there := facts.own.get(name)) is None:
            return f"it cannot import {name}: put it into PYTHONPATH there"
        if digest and there != digest:
            return f"its code of {name} differs from this command's"
    return None


def inspection(meant: Expected, nonce: str, topic: str) -> tuple[Any, ...]:
    """Returns a job that reports the worker's `WorkerFacts`: a function, its arguments.

    Args:
        meant: names what is asked for.
        nonce: path of a file that may be seen there.
        topic: of the message, {"address": of the worker, "facts": fields by name}.
    """
    given = {**_wanted(meant, nonce), "topic": topic}
    # As text: a function of ours would be sent by its name or as bytecode, which a
    # worker without our code, or of another Python, cannot load.
    text = f"{inspect.getsource(inspecting)}\n\nreport(**given)\n"
    return exec, text, {"given": given}


def _wanted(meant: Expected, nonce: str) -> dict[str, Any]:
    """Returns the arguments of `inspection.facts`."""
    return {
        "names": [*meant.versions],
        "own": [*meant.own],
        "packages": [*PACKAGES],
        "nonce": nonce,
    }
