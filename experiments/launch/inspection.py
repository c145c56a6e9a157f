"""Identifies a machine."""

import os
import socket
from pathlib import Path


def host() -> tuple[str, str, str]:
    """Identifies this machine by its name, boot and network."""
    # Containers on one machine may share its name or boot id, but not the network.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        boot = network = ""
    return socket.gethostname(), boot, network
