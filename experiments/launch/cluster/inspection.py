"""Finds who a Dask worker is, and reports it.

A worker is sent the text of this file, as it may lack our code, or have another Python:
nothing here imports ours.
"""

import hashlib
import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def facts(
    names: Sequence[str], own: Sequence[str], packages: Sequence[str], nonce: str
) -> dict[str, Any]:
    """Returns the fields of this process's `WorkerFacts`.

    Args:
        names: "python", and packages whose versions are wanted.
        own: the user's own modules.
        packages: whose code must be the same.
        nonce: path of a file that may be seen here.
    """
    found = [importlib.util.find_spec(name) for name in packages]
    tops = [Path(spec.origin).parent for spec in found if spec and spec.origin]
    code = _digest(tops) if len(tops) == len(packages) else ""
    return {
        "host": host(),
        "pid": os.getpid(),
        "versions": {name: _version(name) for name in names},
        "code": code,
        "loaded": code,
        "folder": str(tops[-1].parent) if tops else "",
        "own": {name: _own(name) for name in own},
        "sees": os.path.exists(nonce),
    }


def host() -> tuple[str, str, str]:
    """Identifies this machine by its name, boot and network."""
    # Containers of a machine share name or boot, but not the network.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # no Linux
        boot = network = ""
    return socket.gethostname(), boot, network


def report(topic: str, packages: Sequence[str], **wanted: Any) -> None:
    """Reports the facts of this Dask worker.

    Args:
        topic: of the message, {"address": of the worker, "facts": fields by name}.
        packages: as in `facts`.
        wanted: the others of `facts`.
    """
    from distributed import get_worker

    worker, found = get_worker(), facts(packages=packages, **wanted)
    has_loaded = any(name.partition(".")[0] in packages for name in sys.modules)
    # A worker outlives many commands, and imports once what is edited between them.
    if has_loaded:
        found["loaded"] = getattr(worker, "syncalgos_code", found["code"])
    vars(worker)["syncalgos_code"] = found["loaded"]
    worker.log_event(topic, {"address": worker.address, "facts": found})


def _version(name: str) -> str:
    if name == "python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _digest(tops: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for top in tops:
        # Editors' locks are links to nowhere.
        for file in sorted(x for x in top.rglob("*.py") if x.is_file()):
            digest.update(f"{file.relative_to(top.parent).as_posix()}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _own(module: str) -> Any:
    """Returns a digest of a module's file, without an import; None if it is not there.

    It is "" where the module is no file, or none that is found without an import.
    """
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    within = [Path(x, *rest) for x in spec.submodule_search_locations or ()]
    files = [y for x in within for y in (x / "__init__.py", x.with_suffix(".py"))]
    if not rest:
        files = [Path(spec.origin or "")]
    kept = [file.read_bytes() for file in files if file.is_file()]
    return hashlib.sha256(kept[0]).hexdigest() if kept else ""
