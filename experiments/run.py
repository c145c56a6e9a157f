"""Trains one task by one algorithm: `python -m experiments.run --algo bmuf`."""

# PYTHON_ARGCOMPLETE_OK

import sys
import time

from experiments.cli import completion, exits, flags
from experiments.launch import membership
from experiments.supervisor.child_side import join_supervisor


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the flags; None means those of the process.

    Returns:
        The exit code: 0 done, 2 bad request, 3 diverged, 4 the processes did not find
        each other, 75 stopped by SIGTERM or by a lost process, 130 stopped by Ctrl-C.
    """
    started = time.perf_counter()
    argv = sys.argv[1:] if argv is None else argv

    def program(stopped: exits.Stopped) -> int:
        request = flags.parse(argv)
        group = membership.group(request.settings)
        from experiments.launch import (  # import jax, which a bad request need not
            job,
            joining,
        )

        if group is not None:
            return joining.supervise(request, argv, group)
        return job.run(request, argv, started, stopped)

    member = join_supervisor()
    if member is None:
        return exits.guarded(program)
    from experiments.launch import joining

    return joining.as_member(member, argv, started)


if __name__ == "__main__":
    completion.answer(flags.parser_for)
    sys.exit(main())
