"""Identifies a Dask worker.

These functions are sent to a worker by value, as it may not have syncalgos installed.
Therefore this file imports nothing else from syncalgos or experiments.
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

PACKAGES = ("syncalgos", "experiments")  # their code must be the same everywhere


def facts(
    names: Sequence[str],
    modules: Sequence[str],
    nonce: str = "",
    host_address: str = "",
    dask_worker: Any = None,
) -> dict[str, Any]:
    """Returns the fields of this process's `Seat`, except its address.

    Args:
        names: names of the packages whose versions are wanted.
        modules: names of custom modules and packages whose code must be the same.
        nonce: path of a file that may be visible here.
        host_address: address at which to find a free port; "" for no port.
        dask_worker: the Dask worker that runs this, set by Dask; None elsewhere.
    """
    found = [importlib.util.find_spec(name) for name in PACKAGES]
    tops = [Path(spec.origin).parent for spec in found if spec and spec.origin]
    code = {name: _digest(name) for name in modules}
    ours = loaded = [code.get(name) for name in PACKAGES]
    if dask_worker is not None:
        # A worker outlives many commands but imports code once, even if it is edited.
        if any(name in sys.modules for name in PACKAGES):
            loaded = getattr(dask_worker, "syncalgos_code", ours)
        vars(dask_worker)["syncalgos_code"] = loaded
    versions = {name: _version(name) for name in names}
    return {
        "host": host(),
        "pid": os.getpid(),
        "versions": versions | {"python": platform.python_version()},
        "code": code,
        "is_stale": loaded != ours,
        "folder": str(tops[-1].parent) if tops else "",
        "sees_out": os.path.exists(nonce),
        "port": _free_port(host_address) if host_address else 0,
    }


def host() -> tuple[str, str, str]:
    """Identifies this machine by its name, boot and network."""
    # Containers on one machine may share its name or boot id, but not the network.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        boot = network = ""
    return socket.gethostname(), boot, network


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as sock:
        return sock.getsockname()[1]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _digest(module: str) -> str | None:
    """Returns a digest of a module's files, without importing it; None if missing."""
    if (spec := importlib.util.find_spec(module)) is None:
        return None
    tops = [Path(x) for x in spec.submodule_search_locations or ()]
    files = {
        x.relative_to(top).as_posix(): x for top in tops for x in top.rglob("*.py")
    }
    if not tops:
        files = {"": Path(spec.origin or "")}
    digest = hashlib.sha256()
    # Lock files of text editors are broken links.
    for name in sorted(name for name, file in files.items() if file.is_file()):
        digest.update(f"{name}\n".encode() + files[name].read_bytes())
    return digest.hexdigest()
