"""Connects the processes of a run, at addresses that other hosts reach."""

import importlib
import socket
from functools import partial
from typing import Any

import jax

from experiments.launch.addresses import address, joined_address, own_address


def connect(
    coordinator: str, process: int, processes: int, seconds: float, device: int | None
) -> None:
    """Starts jax among the other processes.

    Args:
        coordinator: HOST:PORT of jax's service, which process 0 runs.
        process: the number of this one.
        processes: the number of all.
        seconds: how long to wait for them.
        device: the index of the only GPU that this process may take; None takes all.

    Raises:
        RuntimeError: jax's own; in some cases jax ends the process instead.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # jax's own handler of SIGTERM would take the place of ours.
    jax.config.update("jax_enable_preemption_service", False)
    bind_address = listen_towards(coordinator)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        local_device_ids=None if device is None else [device],
        initialization_timeout=round(seconds),
        coordinator_bind_address=bind_address,
    )


def listen_towards(coordinator: str) -> str | None:
    """Makes gloo listen on this host's address in the coordinator's network.

    Args:
        coordinator: HOST:PORT, as other hosts know it.

    Returns:
        The `coordinator_bind_address` for jax on the coordinator's host, whose service
        would listen on all addresses by itself; None if it has to.

    Raises:
        OSError: there is no way to it.
    """
    # By itself gloo takes the address of the host's own name, which many systems have
    # as 127.0.1.1 in /etc/hosts: then no other host finds it. jax (0.10 to 0.12) has
    # no public setting for that.
    inner: Any = importlib.import_module("jaxlib._jax")
    host, port = address(coordinator)
    own = _address_towards(host, port)
    inner.make_gloo_tcp_collectives = partial(
        inner.make_gloo_tcp_collectives, hostname=own
    )
    meant = own_address(host)
    return None if meant is None else joined_address(meant, port)


def _address_towards(host: str, port: int) -> str:
    """Returns this host's address on the way to another; nothing is sent."""
    family, kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return probe.getsockname()[0]
