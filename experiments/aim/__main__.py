"""Compiles runs for hardware that need not be present: `python -m experiments.aim`."""

# PYTHON_ARGCOMPLETE_OK

import sys

from experiments.aim import config
from experiments.command import flags
from experiments.command.errors import run_guarded
from experiments.command.stopping import ReadSignal


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the flags; None means those of the process.

    Returns:
        The exit code: 0 done, even if a run does not fit (the table says so); 1 a
        program could not be compiled; 2 bad request; 75 stopped by SIGTERM or SIGHUP;
        130 stopped by Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv

    def program(read_signal: ReadSignal) -> int:
        aim_config = config.read_config(argv)
        from experiments.aim import jobs  # slow: imports rich

        return jobs.run_jobs(aim_config, argv)

    return run_guarded(program)


if __name__ == "__main__":
    flags.complete(lambda words: config.make_parser())
    sys.exit(main())
