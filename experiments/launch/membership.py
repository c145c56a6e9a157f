"""Which processes a config asks for; jax is asked only where a scheduler knows."""

from experiments.cli.errors import BadRequest
from experiments.supervisor.addresses import address
from experiments.supervisor.group import Group
from experiments.training.config import RunConfig


def requested_group(config: RunConfig) -> Group | None:
    """Returns the processes that a config asks for; None if it is a single one.

    Raises:
        BadRequest: flags that do not go together, or that leave one out.
    """
    try:
        found = _group(config)
        if found is not None:
            _check_layout(config, found.count)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return found


def _group(c: RunConfig) -> Group | None:
    by_hand = {"process_id": c.process_id, "num_processes": c.num_processes}
    given = [name for name, value in by_hand.items() if value is not None]
    ways = [c.processes != 1, c.coordinator is not None, c.distributed == "auto"]
    if sum(ways) > 1:
        raise ValueError(
            "--processes starts processes here, --coordinator and --distributed join "
            "those that are started elsewhere: say one of them"
        )
    if c.coordinator is None:
        if given:
            flag = given[0].replace("_", "-")
            raise ValueError(f"--{flag} goes with --coordinator HOST:PORT")
        if c.distributed == "auto":
            return _detected(c)
        count = c.processes
        return None if count == 1 else Group(count, tuple(range(count)))
    for name, value in by_hand.items():
        if value is None:
            raise ValueError(f"--coordinator goes with --{name.replace('_', '-')}")
    address(c.coordinator)
    count, number = c.num_processes, c.process_id
    if number >= count:
        raise ValueError(
            f"--process-id must be 0 to {count - 1} of {count} processes, got {number}"
        )
    return Group(count, (number,), c.coordinator)


def _detected(c: RunConfig) -> Group:
    """Who this process is by Slurm, Open MPI or Kubernetes, as jax finds it out."""
    from jax._src.clusters import ClusterEnv  # jax tells nobody before it has joined

    timeout = round(c.init_timeout)
    names = (None, None, None, None, None)
    try:
        where, count, number, *_ = ClusterEnv.auto_detect_unset_distributed_params(
            *names, timeout
        )
    except Exception as error:  # whatever a scheduler's environment leads to
        raise ValueError(
            f"--distributed auto: {type(error).__name__}: {error}"
        ) from error
    if where is None or count is None or number is None:
        raise ValueError(
            "--distributed auto finds no Slurm, Open MPI or Kubernetes around this "
            "process: say --coordinator, --process-id and --num-processes"
        )
    return Group(count, (number,), where)


def _check_layout(c: RunConfig, processes: int) -> None:
    """Raises a ValueError for what no number of devices could run."""
    if c.backend == "vmap":
        raise ValueError(
            f"--backend vmap runs on one device, not in {processes} processes: take "
            "pmap or shard_map"
        )
    if c.workers % processes:
        raise ValueError(
            f"{c.workers} workers do not divide over {processes} processes: use a "
            f"multiple of {processes}"
        )
