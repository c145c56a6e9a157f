"""The processes that a config requests; only scheduler detection needs jax."""

from typing import NamedTuple

from experiments.cli.errors import BadRequest
from experiments.launch import schedulers
from experiments.launch.addresses import address
from experiments.training.config import RunConfig


class Membership(NamedTuple):
    """The processes of a run, and this one among them.

    Attributes:
        processes: the number of processes.
        process: the number of this process; None if this command starts all of them.
        coordinator: HOST:PORT of jax's service in process 0; "" if this command starts
            all processes.
    """

    processes: int
    process: int | None = None
    coordinator: str = ""


def requested(config: RunConfig) -> Membership | None:
    """Returns the processes that a config requests; None for a single process.

    Raises:
        BadRequest: flags exclude each other, a flag that others need is missing, or no
            number of devices can run the layout.
    """
    try:
        found = _joining(config)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    if found is None and config.processes > 1:
        found = Membership(config.processes)
    if config.max_restarts and (found is None or found.process is not None):
        raise BadRequest(
            "--max-restarts needs --processes, whose processes it restarts: resume a "
            "run of one process with --resume; after a loss, joined processes end with "
            "exit code 75, and their scheduler may restart them"
        )
    if found is None:
        return None
    if config.backend == "vmap" and found.processes > 1:
        raise BadRequest(
            "--backend vmap runs on one device, not in "
            f"{found.processes} processes: use pmap or shard_map"
        )
    devices = config.worker_devices
    if config.workers * devices % found.processes:
        of_devices = f" of {devices} devices" if devices > 1 else ""
        raise BadRequest(
            f"--workers: {config.workers} workers{of_devices} do not divide over "
            f"{found.processes} processes: use a multiple of {found.processes}"
        )
    return found


def _joining(c: RunConfig) -> Membership | None:
    """Returns the membership of a process started elsewhere; None for other runs.

    Raises:
        ValueError: flags exclude each other, a flag that others need is missing, or a
            value is invalid.
    """
    if (c.processes != 1) + (c.coordinator is not None) + (c.distributed == "auto") > 1:
        raise ValueError(
            "--processes starts processes, but --coordinator and "
            "--distributed auto join processes started elsewhere: use one way only"
        )
    where, number, count = c.coordinator, c.process_id, c.num_processes
    if where is not None and number is not None and count is not None:
        address(where)
        if number >= count:
            raise ValueError(
                f"--process-id must be 0 to {count - 1} with --num-processes {count}, "
                f"got {number}"
            )
        return Membership(count, number, where)
    three = {"--coordinator": where, "--process-id": number, "--num-processes": count}
    given = [name for name, value in three.items() if value is not None]
    if given:
        missing = next(name for name in three if name not in given)
        raise ValueError(f"{given[0]} also needs {missing}")
    if c.distributed == "auto":
        return Membership(*schedulers.detected(c.init_timeout))
    return None
