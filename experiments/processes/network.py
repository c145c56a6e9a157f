"""Addresses of hosts, and the place of a process as its scheduler says it."""

import errno
import importlib
import ipaddress
import os
import re
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from experiments.command.errors import summarize_error
from experiments.training.process_group import ProcessGroup

LOCALHOST = "127.0.0.1"
ATTEMPT = 3.0  # seconds for one attempt to connect
PAUSE = 0.25  # seconds between two


def address(text: str, name: str = "--coordinator") -> tuple[str, int]:
    """Splits HOST:PORT.

    Args:
        text: such as hosta:9999, 10.0.0.1:9999 or [::1]:9999.
        name: the name of the argument, for the error.

    Returns:
        The host, without brackets, and the port.

    Raises:
        ValueError: the text has another form.
    """
    match = re.fullmatch(r"(?:\[([^\[\]\s/]+)\]|([^:\[\]\s/]+)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(
            f"{name} must be HOST:PORT, such as 10.0.0.1:9999 or [::1]:9999 (port 1 to "
            f"65535), got {text!r}"
        )
    return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
    """Joins HOST:PORT, with brackets where the host has colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_own_address(host: str) -> str | None:
    """Finds the address of this machine that a host name or an address refers to.

    Returns:
        The address; None if other machines cannot reach this one by that name, because
        the name is unknown here, or refers to another machine or only to the loopback
        device.
    """
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # The text comes from the user and may not be a valid name.
    except (OSError, UnicodeError):
        return None
    # Many systems list their own name as 127.0.1.1 in /etc/hosts.
    is_name = not is_address(host) and not host.startswith("localhost")
    for meant in (str(place[0]) for *_, place in addresses):
        if is_name and ipaddress.ip_address(meant).is_loopback:
            continue
        with suppress(OSError):  # listening there is the only sure test
            listen(meant, 0).close()
            return meant
    return None


def is_address(host: str) -> bool:
    """Whether a host is given as an IP address and not as a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def reach(host: str, port: int, seconds: float) -> str | None:
    """Waits until a program listens at an address.

    Returns:
        None if it can be reached in time; otherwise the reason of the last failure.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host, port), ATTEMPT) as sock:
                if sock.getsockname() != sock.getpeername():
                    return None
            # Without a program there, a local connection may connect to itself.
            reason = "no program listens there"
        # The text comes from the user and may not be a valid name.
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() >= deadline:
            return reason
        time.sleep(PAUSE)


def listen(host: str | None, port: int) -> socket.socket:
    """Listens at one address of this machine, or at all of them.

    Args:
        host: the address; None for all addresses.
        port: the port; 0 for a free one.

    Raises:
        OSError: the port is in use, or this user may not use it.
    """
    if host is None and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # IPv6 may be switched off
                raise
    family = socket.AF_INET6 if ":" in (host or "") else socket.AF_INET
    return socket.create_server((host or "", port), family=family)


def free_port() -> int:
    """Returns a port that is free now at this machine's own address."""
    with listen(LOCALHOST, 0) as sock:
        return sock.getsockname()[1]


# Variables of torchrun, Kubeflow and others, and of SkyPilot: the number of this
# process, the number of processes, the hosts (process 0's first), and process 0's port.
TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SKYPILOT = ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS")
SKYPILOT += ("JAX_COORDINATOR_PORT",)


def detect_process(seconds: float) -> ProcessGroup:
    """Returns this process among those that a program has started with it.

    torchrun, Kubeflow and SkyPilot are tried first: they run on Kubernetes and Slurm,
    whose variables are then set too.

    Args:
        seconds: how long to wait for the name of process 0's host.

    Raises:
        ValueError: the variables are missing or have wrong values.
    """
    variables = {name for name, value in os.environ.items() if value.split()}
    schedulers = [
        names for names in (TORCH, SKYPILOT) if variables.issuperset(names[:3])
    ]
    number, count, where = (
        _by_variables(*schedulers[0]) if schedulers else _by_jax(seconds)
    )
    if not 0 <= number < count:
        raise ValueError(
            f"--distributed auto: the number of this process must be 0 to {count - 1} "
            f"with {count} processes, got {number}"
        )
    address(where, "--distributed auto: process 0")
    return ProcessGroup(number, count, coordinator=where)


def _by_variables(rank: str, size: str, hosts: str, port: str) -> tuple[int, int, str]:
    """Returns what the variables of these names say, in the order of ProcessGroup."""
    # torchrun itself listens at its port; we take the next one.
    shift = rank == TORCH[0] and "TORCHELASTIC_RUN_ID" in os.environ
    where = join_address(
        os.environ[hosts].split()[0], _read_whole_number(port, "9999") + shift
    )
    return _read_whole_number(rank), _read_whole_number(size), where


def _read_whole_number(name: str, default: str = "") -> int:
    """Reads a variable; a ValueError if it holds no whole number."""
    text = os.environ.get(name) or default
    if not text.isdecimal():
        raise ValueError(
            f"--distributed auto: {name} must be a whole number, got {text!r}"
        )
    return int(text)


def _by_jax(seconds: float) -> tuple[int, int, str]:
    """Returns the same, as jax reads it from Slurm, Open MPI or Kubernetes."""
    # Private: jax has no public way to ask before it has joined the others.
    from jax._src.clusters import ClusterEnv

    try:
        where, count, number, *_ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, round(seconds)
        )
    except Exception as error:  # a scheduler's environment may raise anything
        raise ValueError(f"--distributed auto: {summarize_error(error)}") from error
    if where is None or count is None or number is None:
        raise ValueError(
            "--distributed auto found no scheduler, and none of the variables "
            f"{', '.join((*TORCH, *SKYPILOT))}: set --coordinator, --process-id and "
            "--num-processes (it knows Slurm, Open MPI, Kubernetes, torchrun, SkyPilot)"
        )
    return number, count, where


def host() -> tuple[str, str, str]:
    """Identifies this machine by its name, boot and network."""
    # Containers on one machine may share its name or boot id, but not the network.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        boot = network = ""
    return socket.gethostname(), boot, network


def listen_towards(coordinator: str) -> str | None:
    """Makes gloo listen on this host's address in the coordinator's network.

    Args:
        coordinator: HOST:PORT, as other hosts know it.

    Returns:
        The `coordinator_bind_address` for jax, so that its service listens only on the
        coordinator's address; None if that is not an address of this machine: the
        service, if it runs here, then listens on all addresses.

    Raises:
        OSError: the network has no route to the coordinator.
    """
    # By default gloo uses the address of the host's own name. Many systems list that
    # name as 127.0.1.1 in /etc/hosts, which other hosts cannot reach. jax (0.10 to
    # 0.12) has no public setting for the address.
    runtime: Any = importlib.import_module("jaxlib._jax")
    host, port = address(coordinator)
    runtime.make_gloo_tcp_collectives = partial(
        runtime.make_gloo_tcp_collectives, hostname=_address_towards(host, port)
    )
    meant = find_own_address(host)
    return None if meant is None else join_address(meant, port)


def _address_towards(host: str, port: int) -> str:
    """Returns the address from which this host would reach another; sends nothing."""
    family, kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return probe.getsockname()[0]
