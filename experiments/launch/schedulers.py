"""The place of this process in a run, as whoever started it has set it."""

import os

from experiments.launch.addresses import address, joined_address

Place = tuple[int, int, str]
"""The number of processes, the number of this one, and HOST:PORT of process 0."""

# Of torchrun, Kubeflow and others, then of SkyPilot: the number of a process, that of
# all, process 0's host, which comes first, and its port.
VARIABLES = (
    ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    (
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_IPS",
        "JAX_COORDINATOR_PORT",
    ),
)
PORT = "9999"  # where nobody says another


def detected(seconds: float) -> Place:
    """Returns the place of this process.

    The nearest starter comes first: Kubeflow, torchrun and SkyPilot run on Kubernetes
    and Slurm, whose variables are then there too.

    Args:
        seconds: how long to wait for the name of process 0's host.

    Raises:
        ValueError: nobody has set it, or not well.
    """
    for names in VARIABLES:
        if all(os.environ.get(name, "").split() for name in names[:3]):
            count, number, where = _by_variables(*names)
            break
    else:
        count, number, where = _by_jax(seconds)
    if not 0 <= number < count:
        raise ValueError(
            f"--distributed auto: process {number} is not among {count}: they are 0 to "
            f"{count - 1}"
        )
    address(where, "--distributed auto: process 0")
    return count, number, where


def _by_variables(number: str, count: str, hosts: str, port: str) -> Place:
    """Returns what variables of these names say."""
    values = {number: "", count: "", port: PORT}
    for name, default in values.items():
        values[name] = text = os.environ.get(name) or default
        if not text.isdecimal():
            raise ValueError(
                f"--distributed auto: {name} must be a whole number, got {text!r}"
            )
    # torchrun itself listens at its port, for a store of its own.
    shift = number == "RANK" and "TORCHELASTIC_RUN_ID" in os.environ
    where = joined_address(os.environ[hosts].split()[0], int(values[port]) + shift)
    return int(values[count]), int(values[number]), where


def _by_jax(seconds: float) -> Place:
    """Returns what Slurm, Open MPI or Kubernetes say, as jax reads it."""
    # Private: jax has no public way to ask before it has joined the others.
    from jax._src.clusters import ClusterEnv

    try:
        where, count, number, *_ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, round(seconds)
        )
    except Exception as error:  # a scheduler's environment may raise anything
        line = f"--distributed auto: {type(error).__name__}: {error}"
        raise ValueError(line) from error
    if where is None or count is None or number is None:
        torch, skypilot = (", ".join(names) for names in VARIABLES)
        raise ValueError(
            f"--distributed auto finds none of these around this process: {torch} "
            f"(torchrun, Kubeflow), {skypilot}, Slurm, Open MPI, Kubernetes; say "
            "--coordinator, --process-id and --num-processes"
        )
    return count, number, where
