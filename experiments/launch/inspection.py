"""Identifies a machine, and the code that it has."""

import hashlib
import importlib.util
import os
import socket
from pathlib import Path

PACKAGES = ("syncalgos", "experiments")  # their code must be the same everywhere


def host() -> tuple[str, str, str]:
    """Identifies this machine by its name, boot and network."""
    # Containers on one machine may share its name or boot id, but not the network.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        boot = network = ""
    return socket.gethostname(), boot, network


def digest(module: str) -> str | None:
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
