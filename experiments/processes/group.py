"""The processes that a config requests; only scheduler detection needs jax."""

from experiments.cli.errors import BadRequest, guarded
from experiments.cli.stopping import Stopped
from experiments.processes import network
from experiments.processes.network import Membership, address
from experiments.processes.starter import given_to_starter, start
from experiments.training.config import RunConfig, parse


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
        return Membership(*network.detected(c.init_timeout))
    return None


def run(argv: list[str], started: float) -> int:
    """Executes the run of a command line in as many processes as it requests.

    The run may use only this process. It may use several processes that this command
    starts here, or join processes that are started elsewhere.

    Args:
        argv: the flags of `experiments.run`.
        started: time.perf_counter() at the start of the process.

    Returns:
        The exit code.
    """
    given = given_to_starter()

    def program(stopped: Stopped) -> int:
        return _run(argv, given, started, stopped)

    return guarded(program, has_starter=given is not None)


def _run(
    argv: list[str], given: list[str] | None, started: float, stopped: Stopped
) -> int:
    config = parse(argv)
    if config.out is None and (config.resume or config.resume_center):
        raise BadRequest("--resume continues the run in a folder: name it with --out")
    if config.keep == "best" and not (config.export or config.checkpoint_every):
        told = "--keep best needs a model to keep: add --export or --checkpoint-every"
        raise BadRequest(told)
    membership = requested(config)
    # Imported late: these import jax, so a bad request is reported faster without.
    if membership is None:
        from experiments.launch.run_job import run_job

        return run_job(config, argv, started, stopped)
    if membership.process is None:
        return start(config, argv)
    from experiments.processes.join import run_joined

    has_starter = given is not None
    return run_joined(config, given or argv, started, stopped, membership, has_starter)
