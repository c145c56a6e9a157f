"""The processes that a config asks for, found without jax unless a scheduler knows."""

from typing import NamedTuple

from experiments.cli.errors import BadRequest
from experiments.launch import schedulers
from experiments.launch.addresses import address
from experiments.training.config import RunConfig


class Membership(NamedTuple):
    """The processes of a run, and this one among them.

    Attributes:
        processes: the number of processes.
        process: the number of this one; None if this command starts all of them.
        coordinator: HOST:PORT of jax's service in process 0; "" likewise.
    """

    processes: int
    process: int | None = None
    coordinator: str = ""


def requested(config: RunConfig) -> Membership | None:
    """Returns the processes that a config asks for; None for a single one.

    Raises:
        BadRequest: flags that do not go together, or that leave one out, or a layout
            that no number of devices could run.
    """
    try:
        found = _membership(config)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    if found is None:
        if config.max_restarts:
            raise BadRequest(
                "--max-restarts restarts the processes of --processes or --scheduler; "
                "a run of one process goes on by the same command with --resume"
            )
        return None
    if config.backend == "vmap" and found.processes > 1:
        raise BadRequest(
            "--backend vmap runs on one device, not in "
            f"{found.processes} processes: take pmap or shard_map"
        )
    if found.process is not None and config.max_restarts:
        raise BadRequest(
            "--max-restarts restarts processes that this command starts: those that "
            "join each other end with code 75, and who started them starts them again"
        )
    devices = config.worker_devices
    if config.workers * devices % found.processes:
        of_devices = f" of {devices} devices" if devices > 1 else ""
        raise BadRequest(
            f"{config.workers} workers{of_devices} do not divide over "
            f"{found.processes} processes: use a multiple of {found.processes}"
        )
    return found


def _membership(c: RunConfig) -> Membership | None:
    by_hand = {"--process-id": c.process_id, "--num-processes": c.num_processes}
    given = [name for name, value in by_hand.items() if value is not None]
    # Processes are started either here or elsewhere, never both.
    ways = [c.processes != 1, c.coordinator is not None, c.distributed == "auto"]
    if sum(ways) > 1:
        raise ValueError(
            "--processes starts processes here, --coordinator and --distributed join "
            "those that are started elsewhere: say one of them"
        )
    if c.scheduler is not None and (c.coordinator or c.distributed == "auto"):
        raise ValueError(
            "--scheduler starts processes on a cluster's workers, --coordinator and "
            "--distributed join those that are started elsewhere: say one of them"
        )
    if c.coordinator is None:
        if given:
            raise ValueError(f"{given[0]} goes with --coordinator HOST:PORT")
        if c.distributed == "auto":
            return Membership(*schedulers.detected(c.init_timeout))
        count = c.processes
        is_alone = count == 1 and c.scheduler is None
        return None if is_alone else Membership(count)
    for name, value in by_hand.items():
        if value is None:
            raise ValueError(f"--coordinator goes with {name}")
    address(c.coordinator)
    count, number = c.num_processes, c.process_id
    assert count is not None and number is not None  # as was just checked
    if number >= count:
        raise ValueError(
            f"--process-id must be 0 to {count - 1} of {count} processes, got {number}"
        )
    return Membership(count, number, c.coordinator)
