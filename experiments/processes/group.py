"""Runs a command line in the processes that it asks for: one, or several."""

from experiments.command.errors import BadRequest, guarded, refusing
from experiments.command.stopping import Stopped
from experiments.processes import network
from experiments.processes.starter import given_to_starter, start
from experiments.training.config import RunConfig, parse
from experiments.training.process_group import ProcessGroup


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
        config = parse(argv)
        _check_files(config)
        group = requested(config)
        if config.processes > 1:
            return start(config, argv)
        # Imported late: these import jax, so a bad request is reported faster without.
        from experiments.one_run import make

        if not group.coordinator:
            return make(config, argv, started, stopped)
        from experiments.processes.join import Member

        def train(config: RunConfig, group: ProcessGroup) -> int:
            return make(config, given or argv, started, stopped, group)

        return Member(group, stopped, given is not None).run(config, train)

    return guarded(program, has_starter=given is not None)


def _check_files(c: RunConfig) -> None:
    """Raises a BadRequest for flags that name no place for what they ask for."""
    if c.out is None and (c.resume or c.resume_center):
        raise BadRequest("--resume continues the run in a folder: name it with --out")
    if c.keep == "best" and not (c.export or c.checkpoint_every):
        told = "--keep best needs a model to keep: add --export or --checkpoint-every"
        raise BadRequest(told)


def requested(config: RunConfig) -> ProcessGroup:
    """Returns the processes that a config requests; only schedulers' need jax.

    Raises:
        BadRequest: flags exclude each other, a flag that others need is missing, or no
            number of devices can run the layout.
    """
    with refusing():
        group = _joining(config) or ProcessGroup(processes=config.processes)
    if config.max_restarts and config.processes == 1:
        raise BadRequest(
            "--max-restarts needs --processes, whose processes it restarts: resume one "
            "with --resume; joined ones end with 75: their scheduler may restart them"
        )
    if config.backend == "vmap" and group.processes > 1:
        raise BadRequest(
            f"--backend vmap has one device, not {group.processes} processes: use pmap"
        )
    devices = config.worker_devices
    if config.workers * devices % group.processes:
        of_devices = f" of {devices} devices" if devices > 1 else ""
        raise BadRequest(
            f"--workers: {config.workers} workers{of_devices} do not divide over "
            f"{group.processes} processes: use a multiple of {group.processes}"
        )
    return group


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
    where, number, count = c.coordinator, c.process_id, c.num_processes
    if where is not None and number is not None and count is not None:
        network.address(where)
        if number >= count:
            must = f"must be 0 to {count - 1} with --num-processes {count}"
            raise ValueError(f"--process-id {must}, got {number}")
        return ProcessGroup(number, count, coordinator=where)
    three = {"--coordinator": where, "--process-id": number, "--num-processes": count}
    if given := [name for name, value in three.items() if value is not None]:
        missing = next(name for name in three if name not in given)
        raise ValueError(f"{given[0]} also needs {missing}")
    return network.detected(c.init_timeout) if c.distributed == "auto" else None
