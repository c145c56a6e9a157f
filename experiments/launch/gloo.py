"""Has gloo and jax's own service listen where other hosts reach this one alone."""

import importlib
import socket
from functools import partial
from typing import Any

from experiments.supervisor.addresses import address, joined_address, own_address


def listen_towards(coordinator: str) -> str | None:
    """Has gloo listen on this host's address in the coordinator's network.

    By itself it takes the address of the host's own name, which many systems have as
    127.0.1.1 in /etc/hosts: then no other host finds it. jax (0.10 to 0.12) has no
    public setting for that.

    Args:
        coordinator: HOST:PORT, as other hosts know it.

    Returns:
        What jax's `coordinator_bind_address` shall be on the coordinator's host: by
        itself the service listens on all addresses. None where that must be.

    Raises:
        OSError: there is no way to it.
    """
    inner: Any = importlib.import_module("jaxlib._jax")
    host, port = address(coordinator)
    own = _address_towards(host, port)
    inner.make_gloo_tcp_collectives = partial(
        inner.make_gloo_tcp_collectives, hostname=own
    )
    meant = own_address(host)
    return None if meant is None else joined_address(meant, port)


def _address_towards(host: str, port: int) -> str:
    """Of this host, in the network by which another is reached; nothing is sent."""
    family, kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return probe.getsockname()[0]
