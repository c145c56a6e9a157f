"""Runs a command line in one process or in several."""

from experiments.cli import exits
from experiments.cli.errors import BadRequest
from experiments.launch.membership import requested
from experiments.launch.starter import given_to_starter, start
from experiments.training.config import parse


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

    def program(stopped: exits.Stopped) -> int:
        return _run(argv, given, started, stopped)

    return exits.guarded(program, has_starter=given is not None)


def _run(
    argv: list[str], given: list[str] | None, started: float, stopped: exits.Stopped
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
        from experiments.training.one_run import make

        return make(config, argv, started, stopped)
    if membership.process is None:
        return start(config, argv)
    from experiments.launch.joining.member import run_joined

    has_starter = given is not None
    return run_joined(config, given or argv, started, stopped, membership, has_starter)
