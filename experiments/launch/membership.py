"""Which processes a request asks for; jax is asked only where a scheduler knows."""

from argparse import Namespace

from experiments.cli.errors import BadRequest
from experiments.supervisor.addresses import address
from experiments.supervisor.group import Group


def group(settings: Namespace) -> Group | None:
    """Returns the processes that a request asks for; None if it is a single one.

    Raises:
        BadRequest: flags that do not go together, or that leave one out.
    """
    try:
        found = _group(settings)
        if found is not None:
            _check_layout(settings, found.count)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return found


def _group(s: Namespace) -> Group | None:
    by_hand = {"process_id": s.process_id, "num_processes": s.num_processes}
    given = [name for name, value in by_hand.items() if value is not None]
    ways = [s.processes != 1, s.coordinator is not None, s.distributed == "auto"]
    if sum(ways) > 1:
        raise ValueError(
            "--processes starts processes here, --coordinator and --distributed join "
            "those that are started elsewhere: say one of them"
        )
    if s.coordinator is None:
        if given:
            flag = given[0].replace("_", "-")
            raise ValueError(f"--{flag} goes with --coordinator HOST:PORT")
        if s.distributed == "auto":
            return _detected(s)
        count = s.processes
        return None if count == 1 else Group(count, tuple(range(count)))
    for name, value in by_hand.items():
        if value is None:
            raise ValueError(f"--coordinator goes with --{name.replace('_', '-')}")
    address(s.coordinator)
    count, number = s.num_processes, s.process_id
    if number >= count:
        raise ValueError(
            f"--process-id must be 0 to {count - 1} of {count} processes, got {number}"
        )
    return Group(count, (number,), s.coordinator)


def _detected(s: Namespace) -> Group:
    """Who this process is by Slurm, Open MPI or Kubernetes, as jax finds it out."""
    from jax._src.clusters import ClusterEnv  # jax tells nobody before it has joined

    timeout = round(s.init_timeout)
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


def _check_layout(s: Namespace, processes: int) -> None:
    """Raises a ValueError for what no number of devices could run."""
    if s.backend == "vmap":
        raise ValueError(
            f"--backend vmap runs on one device, not in {processes} processes: take "
            "pmap or shard_map"
        )
    if s.workers % processes:
        raise ValueError(
            f"{s.workers} workers do not divide over {processes} processes: use a "
            f"multiple of {processes}"
        )
