"""Asks Dask workers who they are, before they get work."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PACKAGES = ("syncalgos", "experiments")  # whose code must be the same


class Expected(NamedTuple):
    """The command's own state, which its workers must share.

    Attributes:
        versions: of Python and the packages, by name.
        code: SHA-256 of the code of `PACKAGES`.
        modules: the user's own packages, by name.
    """

    versions: dict[str, str]
    code: str
    modules: tuple[str, ...]


class WorkerFacts(NamedTuple):
    """A worker's answer.

    Attributes:
        host: name, boot and network of its machine, which together identify it.
        pid: process id.
        versions: as in `Expected`; "" for a package that is not installed.
        code: as in `Expected`; "" if it does not find the code.
        loaded: the same, of the code that it has imported.
        folder: the checkout in which it finds it.
        missing: the user's packages that it does not find.
        sees: whether it sees the file whose path it was given.
    """

    host: tuple[str, ...]
    pid: int
    versions: dict[str, str]
    code: str
    loaded: str
    folder: str
    missing: list[str]
    sees: bool


def expected(versions: Mapping[str, str], names: tuple[str, ...]) -> Expected:
    """Returns the state of this process.

    Args:
        versions: of Python and the packages, as `prepared.versions` has them.
        names: of task and algorithm; those with a colon are the user's own.
    """
    # The library's version is part of its code.
    kept = {name: text for name, text in versions.items() if name != "syncalgos"}
    own = {name.partition(":")[0].partition(".")[0] for name in names if ":" in name}
    unknown = Expected(kept, "", tuple(sorted(own)))
    return unknown._replace(code=_inspector(unknown, "")()["code"])


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
    if facts.missing:
        return f"it cannot import {facts.missing[0]}: put it into PYTHONPATH there"
    return None


def inspection(meant: Expected, nonce: str, topic: str) -> Callable[[], None]:
    """Returns a job that reports the worker's `WorkerFacts` under a topic.

    Args:
        meant: names what is asked for.
        nonce: path of a file that may be seen there.
        topic: of the message, {"address": of the worker, "facts": fields by name}.
    """
    inspect, packages = _inspector(meant, nonce), PACKAGES

    def report() -> None:
        import sys

        from distributed import get_worker

        worker, facts = get_worker(), inspect()
        has_loaded = any(name.partition(".")[0] in packages for name in sys.modules)
        # A worker outlives many commands, and imports once what is edited between them.
        known = getattr(worker, "syncalgos_code", facts["code"])
        facts["loaded"] = known if has_loaded else facts["code"]
        vars(worker)["syncalgos_code"] = facts["loaded"]
        worker.log_event(topic, {"address": worker.address, "facts": facts})

    return report


def _inspector(meant: Expected, nonce: str) -> Callable[[], dict[str, Any]]:
    """Returns a function whose result is the fields of this process's `WorkerFacts`.

    Args:
        meant: names what is asked for.
        nonce: path of a file that may be seen there.
    """
    names, modules, packages = [*meant.versions], meant.modules, PACKAGES

    # Nested, so that it travels as code: a worker that lacks ours can still say so. It
    # uses nothing of this module for the same reason.
    def inspect() -> dict[str, Any]:
        import hashlib
        import importlib.util
        import os
        import platform
        import socket
        from importlib import metadata
        from pathlib import Path

        def version(name: str) -> str:
            if name == "python":
                return platform.python_version()
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                return ""

        def read(path: str) -> str:
            # Containers of a machine share name or boot, but not the network.
            try:
                return Path(path).read_text().strip()
            except OSError:  # no Linux
                return ""

        found = [importlib.util.find_spec(name) for name in packages]
        tops = [Path(spec.origin).parent for spec in found if spec and spec.origin]
        digest = hashlib.sha256()
        for top in tops:
            # Editors' locks are links to nowhere.
            for file in sorted(x for x in top.rglob("*.py") if x.is_file()):
                digest.update(f"{file.relative_to(top.parent).as_posix()}\n".encode())
                digest.update(file.read_bytes())
        links = "/proc/self/ns/net"
        network = os.readlink(links) if os.path.exists(links) else ""
        boot = read("/proc/sys/kernel/random/boot_id")
        return {
            "host": (socket.gethostname(), boot, network),
            "pid": os.getpid(),
            "versions": {name: version(name) for name in names},
            "code": digest.hexdigest() if len(tops) == len(packages) else "",
            "folder": str(tops[-1].parent) if tops else "",
            "missing": [x for x in modules if importlib.util.find_spec(x) is None],
            "sees": os.path.exists(nonce),
        }

    return inspect
