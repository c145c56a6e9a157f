"""Finds who a Dask worker is.

A worker is sent these functions by value, as it may lack our code: nothing here imports
ours.
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
    names: Sequence[str],
    modules: Sequence[str],
    packages: Sequence[str],
    nonce: str = "",
    host_address: str = "",
    dask_worker: Any = None,
) -> dict[str, Any]:
    """Returns the fields of this process's `Seat`, but its address.

    Args:
        names: "python", and packages whose versions are wanted.
        modules: the user's own.
        packages: whose code must be the same.
        nonce: path of a file that may be seen here.
        host_address: where a free port is wanted; "" where none is.
        dask_worker: set by Dask, where this runs on one.
    """
    specs = [importlib.util.find_spec(name) for name in packages]
    tops = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    code = loaded = _digest(tops) if len(tops) == len(packages) else ""
    if dask_worker is not None:
        # A worker outlives many commands, and imports once what is edited between them.
        if any(name.partition(".")[0] in packages for name in sys.modules):
            loaded = getattr(dask_worker, "syncalgos_code", code)
        vars(dask_worker)["syncalgos_code"] = loaded
    return {
        "host": host(),
        "pid": os.getpid(),
        "versions": {name: _version(name) for name in names},
        "code": code,
        "loaded": loaded,
        "folder": str(tops[-1].parent) if tops else "",
        "own": {name: _own(name) for name in modules},
        "sees_out": os.path.exists(nonce),
        "port": _free_port(host_address) if host_address else 0,
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


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as sock:
        return sock.getsockname()[1]


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


def _own(module: str) -> str | None:
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
    for file in files:
        if file.is_file():
            return hashlib.sha256(file.read_bytes()).hexdigest()
    return ""
