"""Runs a command line in the processes that it asks for: one, or several."""

from experiments.command.errors import BadRequest, refusing, run_guarded
from experiments.command.stopping import ReadSignal
from experiments.processes import network
from experiments.processes.starter import find_starter_argv, start_processes
from experiments.training.config import RunConfig, parse
from experiments.training.process_group import ProcessGroup


def run_in_processes(argv: list[str], started: float) -> int:
    """Executes the run of a command line in as many processes as it requests.

    The run may use only this process. It may use several processes that this command
    starts here, or join processes that are started elsewhere.

    Args:
        argv: the flags of `experiments.run`.
        started: time.perf_counter() at the start of the process.

    Returns:
        The exit code.
    """
    starter_argv = find_starter_argv()

    def program(read_signal: ReadSignal) -> int:
        config = parse(argv)
        _check_files(config)
        group = find_requested_processes(config)
        if config.processes > 1:
            return start_processes(config, argv)
        # Imported late: these import jax, so a bad request is reported faster without.
        from experiments.one_run import make_run_of_command

        if not group.coordinator:
            return make_run_of_command(config, argv, started, read_signal)
        from experiments.processes.join import Member

        def train(config: RunConfig, group: ProcessGroup) -> int:
            return make_run_of_command(
                config, starter_argv or argv, started, read_signal, group
            )

        return Member(group, read_signal, starter_argv is not None).run(config, train)

    return run_guarded(program, has_starter=starter_argv is not None)


def _check_files(c: RunConfig) -> None:
    """Raises a BadRequest for flags that name no place for what they ask for."""
    if c.out is None and (c.resume or c.resume_center):
        raise BadRequest("--resume continues the run in a folder: name it with --out")
    if c.keep == "best" and not (c.export or c.checkpoint_every):
        raise BadRequest(
            "--keep best needs a model to keep: add --export or --checkpoint-every"
        )


def find_requested_processes(config: RunConfig) -> ProcessGroup:
    """Returns the processes that a config requests; only schedulers' need jax.

    Raises:
        BadRequest: flags exclude each other, a flag that others need is missing, or no
            number of devices can run the layout.
    """
    with refusing():
        group = _joining(config) or ProcessGroup(processes=config.processes)
    if config.max_restarts and config.processes == 1:
        raise BadRequest(
            "--max-restarts needs --processes, whose processes it restarts: resume a "
            "run of one process with --resume; after a loss, joined processes end with "
            "exit code 75, and their scheduler may restart them"
        )
    if config.backend == "vmap" and group.processes > 1:
        raise BadRequest(
            f"--backend vmap runs on one device, not in {group.processes} processes: "
            "use pmap or shard_map"
        )
    num_devices = config.worker_devices
    if config.workers * num_devices % group.processes == 0:
        return group
    if num_devices == 1:
        raise BadRequest(
            f"--workers: {config.workers} workers do not divide over "
            f"{group.processes} processes: use a multiple of {group.processes}"
        )
    raise BadRequest(
        f"--workers: {config.workers} workers of {num_devices} devices do not divide "
        f"over {group.processes} processes: use a multiple of {group.processes}"
    )


def _joining(c: RunConfig) -> ProcessGroup | None:
    """Returns the processes started elsewhere that a config joins, if it joins any.

    Raises:
        ValueError: flags exclude each other, a flag that others need is missing, or a
            value is invalid.
    """
    if (c.processes != 1) + (c.coordinator is not None) + (c.distributed == "auto") > 1:
        raise ValueError(
            "--processes starts processes, but --coordinator and "
            "--distributed auto join processes started elsewhere: use one way only"
        )
    coordinator = c.coordinator
    process = c.process_id
    processes = c.num_processes
    if coordinator is not None and process is not None and processes is not None:
        network.address(coordinator)
        if process >= processes:
            raise ValueError(
                f"--process-id must be 0 to {processes - 1} with --num-processes "
                f"{processes}, got {process}"
            )
        return ProcessGroup(process, processes, coordinator=coordinator)
    values_by_flag = {
        "--coordinator": coordinator,
        "--process-id": process,
        "--num-processes": processes,
    }
    set_flags = [flag for flag, value in values_by_flag.items() if value is not None]
    if set_flags:
        missing_flag = next(flag for flag in values_by_flag if flag not in set_flags)
        raise ValueError(f"{set_flags[0]} also needs {missing_flag}")
    return network.detect_process(c.init_timeout) if c.distributed == "auto" else None
