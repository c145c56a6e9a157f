"""The place of this process in a run, as whoever started it has set it."""

import os
from collections.abc import Mapping

from experiments.launch.addresses import address, joined_address

Place = tuple[int, int, str]
"""The number of processes, the number of this one, and HOST:PORT of process 0."""

TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SKYPILOT = ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS")
PORT = 9999  # where nobody says another


def detected(seconds: float) -> Place:
    """Returns the place of this process.

    The nearest starter comes first: Kubeflow, torchrun and SkyPilot run on Kubernetes
    and Slurm, whose variables are then there too.

    Args:
        seconds: how long to wait for the name of process 0's host.

    Raises:
        ValueError: nobody has set it, or not well.
    """
    place = _by_torch(os.environ) or _by_skypilot(os.environ) or _by_jax(seconds)
    return _checked(place)


def _by_torch(environ: Mapping[str, str]) -> Place | None:
    """Returns what torchrun, Kubeflow and others say in the variables of torch."""
    if not all(environ.get(name) for name in TORCH):
        return None
    rank, count, host, port = (environ[name] for name in TORCH)
    # torchrun itself listens there, for a store of its own.
    shift = 1 if "TORCHELASTIC_RUN_ID" in environ else 0
    where = joined_address(host, _whole("MASTER_PORT", port) + shift)
    return _whole("WORLD_SIZE", count), _whole("RANK", rank), where


def _by_skypilot(environ: Mapping[str, str]) -> Place | None:
    """Returns what SkyPilot says: one process a node."""
    if not all(environ.get(name, "").split() for name in SKYPILOT):
        return None
    rank, count, hosts = (environ[name] for name in SKYPILOT)
    port = environ.get("JAX_COORDINATOR_PORT") or str(PORT)
    where = joined_address(hosts.split()[0], _whole("JAX_COORDINATOR_PORT", port))
    return _whole(SKYPILOT[1], count), _whole(SKYPILOT[0], rank), where


def _by_jax(seconds: float) -> Place:
    """Returns what Slurm, Open MPI or Kubernetes say, as jax reads it."""
    # Private: jax has no public way to ask before it has joined the others.
    from jax._src.clusters import ClusterEnv

    try:
        where, count, number, *_ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, round(seconds)
        )
    except Exception as error:  # a scheduler's environment may raise anything
        raise ValueError(
            f"--distributed auto: {type(error).__name__}: {error}"
        ) from error
    if where is None or count is None or number is None:
        raise ValueError(
            "--distributed auto finds none of these around this process: "
            f"{', '.join(TORCH)} (torchrun, Kubeflow), {', '.join(SKYPILOT)}, Slurm, "
            "Open MPI, Kubernetes; say --coordinator, --process-id and --num-processes"
        )
    return count, number, where


def _checked(place: Place) -> Place:
    count, number, where = place
    if not 0 <= number < count:
        raise ValueError(
            f"--distributed auto: process {number} is not among {count}: they are 0 to "
            f"{count - 1}"
        )
    try:
        address(where)
    except ValueError:
        raise ValueError(
            "--distributed auto: process 0 must be at HOST:PORT, such as 10.0.0.1:9999 "
            f"or [::1]:9999, got {where!r}"
        ) from None
    return place


def _whole(name: str, text: str) -> int:
    """Reads a variable; a ValueError if it holds no whole number."""
    if not text.isdecimal():
        raise ValueError(
            f"--distributed auto: {name} must be a whole number, got {text!r}"
        )
    return int(text)
