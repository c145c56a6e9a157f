"""Trains one task by one algorithm: `python -m experiments.run --algo bmuf`."""

import sys
import time

from experiments import exits, flags


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the flags; None means those of the process.

    Returns:
        The exit code: 0 done, 2 bad request, 3 diverged, 75 stopped by SIGTERM, 130
        stopped by Ctrl-C.
    """
    started = time.perf_counter()
    argv = sys.argv[1:] if argv is None else argv

    def program(stopped: exits.Stopped) -> int | None:
        request = flags.parse(argv)
        from experiments import job  # imports jax, which --help need not wait for

        outcome = job.run(request, argv, started, stopped)
        if outcome.diverged_at is not None:
            return exits.DIVERGED
        return None if outcome.stopped else exits.DONE

    return exits.guarded(program)


if __name__ == "__main__":
    sys.exit(main())
