"""Trains one task by one algorithm: `python -m experiments.run --algo bmuf`."""

# PYTHON_ARGCOMPLETE_OK

import sys
import time

from experiments.cli import completion, exits, flags
from experiments.cli.errors import BadRequest
from experiments.launch.membership import requested
from experiments.launch.supervisor.child_side import join_supervisor
from experiments.training.config import RunConfig, parse


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the flags; None means those of the process.

    Returns:
        The exit code: 0 done, 2 bad request, 3 diverged, 4 the processes did not find
        each other, 75 stopped by SIGTERM, SIGHUP or a lost process, 130 by Ctrl-C.
    """
    started = time.perf_counter()
    argv = sys.argv[1:] if argv is None else argv

    def program(stopped: exits.Stopped) -> int:
        config = parse(argv)
        if config.out is None and (config.resume or config.resume_center):
            raise BadRequest("--resume goes on with the run of a folder: say --out")
        membership = requested(config)
        # Imports jax, which a bad request need not.
        from experiments.launch import processes, run_job
        from experiments.launch.joining.member import run_joined

        if membership is None:
            return run_job.run_job(config, argv, started, stopped)
        if membership.process is None:
            return processes.supervise(config, argv, membership.processes)
        return run_joined(config, argv, started, stopped, membership)

    member = join_supervisor()
    if member is None:
        return exits.guarded(program)
    from experiments.launch import processes

    processes.run_as_member(member, argv, started)


if __name__ == "__main__":
    completion.answer(lambda words: flags.parser_for(words, RunConfig))
    sys.exit(main())
