"""Connects the processes of a run at addresses that other hosts can reach."""

import importlib
import inspect
import os
import re
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from experiments.cli import certificates
from experiments.cli.errors import BadRequest, named, place
from experiments.exit_codes import UNCONNECTED
from experiments.launch.addresses import address, joined_address, own_address

LOST_AFTER = 20  # seconds without a sign of life before jax counts a process as lost

# jax has no error type for a lost process, and each backend has its own text. Errors of
# a user's callback have jax's type, too, with the user's text.
_GONE = re.compile(
    "(?!.*callback error).*(?:gloo|nccl|coordination|broken pipe|socket closed|"
    "connection (?:reset|closed|refused)|unavailable|deadline_exceeded|timed out)",
    re.IGNORECASE,
)

# jax (from 0.12) needs all three of these files for mutual TLS.
_TLS = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")


def tls_variables() -> dict[str, str]:
    """Returns the environment variables that turn on TLS in jax's service."""
    names = (*_TLS, "JAX_MTLS_PEER_URI_PREFIX")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def check_tls() -> None:
    """Raises a BadRequest for certificates that jax would not use."""
    if not (given := tls_variables()):
        return
    first = next(iter(given))
    if missing := [name for name in _TLS if name not in given]:
        raise BadRequest(f"{first} is set, but not {missing[0]}: TLS needs both")
    parameters = inspect.signature(jax.distributed.initialize).parameters
    if "mtls_cert_file" not in parameters:
        raise BadRequest(
            f"{first} is set, but jax {jax.__version__} does not support TLS: "
            "install jax 0.12, or unset the variable"
        )
    certificates.check({name: given[name] for name in _TLS})


def hinted(code: int, log: Callable[[str], None]) -> int:
    """Returns a run's exit code; adds a hint if processes with TLS did not connect."""
    if code == UNCONNECTED and tls_variables():
        log(
            "TLS is on (JAX_MTLS_CERT_FILE): the certificates of all processes must "
            "come from the same authority, and that of process 0 must name its host"
        )
    return code


def tells_of_loss(error: Exception) -> bool:
    """Whether an error of jax itself says that another process is gone."""
    # Where a call begins, jax raises a runtime's error as a ValueError.
    kinds = jax.errors.JaxRuntimeError, ValueError
    is_of_jax = isinstance(error, kinds) and not place(error)
    return is_of_jax and _GONE.match(named(error)) is not None


def connect(coordinator: str, process: int, processes: int, seconds: float) -> None:
    """Starts jax among the other processes.

    Args:
        coordinator: HOST:PORT of jax's service, which process 0 runs.
        process: the number of this process.
        processes: the number of processes.
        seconds: seconds to wait for the other processes.

    Raises:
        RuntimeError: jax could not connect; in most cases it aborts the process
            instead.
        OSError: the network has no route to the coordinator.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # jax's own handler of SIGTERM would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    bind_address = listen_towards(coordinator)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        # Otherwise jax would ask Slurm or Kubernetes which devices to use.
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(seconds)),
        coordinator_bind_address=bind_address,
        heartbeat_timeout_seconds=LOST_AFTER,
    )


def take_devices(number: int, sharing: int, count: int) -> None:
    """Selects the GPUs of one process on a host, before jax looks for devices.

    Args:
        number: the number of this process among those on this host.
        sharing: the number of processes on this host; all take equally many GPUs.
        count: the number of GPUs that the mesh of one process needs; 0 without a mesh.
    """
    if sharing == 1:
        return
    each = count or 1
    own = ",".join(str(number * each + i) for i in range(each))
    for kind in ("cuda", "rocm"):
        jax.config.update(f"jax_{kind}_visible_devices", own)


def store() -> Any:
    """Returns the client of jax's service, which keeps values for all processes."""
    # jax offers no public access to it; orbax uses the same private module.
    from jax._src import distributed

    return distributed.global_state.client


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
    inner: Any = importlib.import_module("jaxlib._jax")
    host, port = address(coordinator)
    own = _address_towards(host, port)
    inner.make_gloo_tcp_collectives = partial(
        inner.make_gloo_tcp_collectives, hostname=own
    )
    meant = own_address(host)
    return None if meant is None else joined_address(meant, port)


def _address_towards(host: str, port: int) -> str:
    """Returns the address from which this host would reach another; sends nothing."""
    family, kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return probe.getsockname()[0]
