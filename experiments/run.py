"""Trains one task with one algorithm: `python -m experiments.run --algo bmuf`."""

# PYTHON_ARGCOMPLETE_OK

import sys
import time

from experiments.command import flags
from experiments.processes import group
from experiments.training.config import RunConfig


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the flags; None means those of the process.

    Returns:
        The exit code: 0 done; 1 an output could not be written; 2 bad request; 3
        diverged; 4 the processes did not find each other; 75 stopped by SIGTERM, SIGHUP
        or a lost process; 130 stopped by Ctrl-C.
    """
    return group.run_in_processes(
        sys.argv[1:] if argv is None else argv, time.perf_counter()
    )


if __name__ == "__main__":
    flags.complete(lambda words: flags.parser_for(words, RunConfig))
    sys.exit(main())
