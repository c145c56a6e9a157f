"""The place of this process in a run, as set by the program that started it."""

import os

from experiments.cli.errors import named
from experiments.launch.addresses import address, joined_address

Place = tuple[int, int, str]
"""The number of processes, the number of this one, and HOST:PORT of process 0."""

# Variables of torchrun, Kubeflow and others, and of SkyPilot: the number of this
# process, the number of processes, the hosts (process 0's first), and process 0's port.
TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SKYPILOT = ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS")
SKYPILOT += ("JAX_COORDINATOR_PORT",)
PORT = "9999"  # the default


def detected(seconds: float) -> Place:
    """Returns the place of this process.

    torchrun, Kubeflow and SkyPilot are tried first: they run on Kubernetes and Slurm,
    whose variables are then set too.

    Args:
        seconds: how long to wait for the name of process 0's host.

    Raises:
        ValueError: the variables are missing or have wrong values.
    """
    for names in (TORCH, SKYPILOT):
        if all(os.environ.get(name, "").split() for name in names[:3]):
            count, number, where = _by_variables(*names)
            break
    else:
        count, number, where = _by_jax(seconds)
    if not 0 <= number < count:
        raise ValueError(
            f"--distributed auto: the number of this process must be 0 to {count - 1} "
            f"with {count} processes, got {number}"
        )
    address(where, "--distributed auto: process 0")
    return count, number, where


def _by_variables(rank: str, size: str, hosts: str, port: str) -> Place:
    """Returns the place given by the variables of these names."""
    # torchrun itself listens at its port; we take the next one.
    shift = rank == TORCH[0] and "TORCHELASTIC_RUN_ID" in os.environ
    host = os.environ[hosts].split()[0]
    return _whole(size), _whole(rank), joined_address(host, _whole(port, PORT) + shift)


def _whole(name: str, default: str = "") -> int:
    """Reads a variable; a ValueError if it holds no whole number."""
    text = os.environ.get(name) or default
    if not text.isdecimal():
        raise ValueError(
            f"--distributed auto: {name} must be a whole number, got {text!r}"
        )
    return int(text)


def _by_jax(seconds: float) -> Place:
    """Returns the place that jax reads from Slurm, Open MPI or Kubernetes."""
    # Private: jax has no public way to ask before it has joined the others.
    from jax._src.clusters import ClusterEnv

    try:
        where, count, number, *_ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, round(seconds)
        )
    except Exception as error:  # a scheduler's environment may raise anything
        raise ValueError(f"--distributed auto: {named(error)}") from error
    if where is None or count is None or number is None:
        raise ValueError(
            "--distributed auto found no scheduler, and none of the variables "
            f"{', '.join((*TORCH, *SKYPILOT))}: set --coordinator, --process-id and "
            "--num-processes (it knows Slurm, Open MPI, Kubernetes, torchrun, SkyPilot)"
        )
    return count, number, where
