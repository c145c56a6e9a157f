"""The command line of a study."""

import sys

from experiments.command.errors import run_guarded
from experiments.command.stopping import ReadSignal
from experiments.study import config


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the flags; None means those of the process.

    Returns:
        The exit code: 0 done, even if runs diverged (the report shows them); 1 runs
        failed, or the report could not be written; 2 bad request; 4 no scheduler
        answers; 75 stopped by SIGTERM, SIGHUP, a full disk, a lost scheduler or lost
        workers; 130 stopped by Ctrl-C. After 1, 75 and 130, the same command continues
        the study.
    """
    words = sys.argv[1:] if argv is None else argv

    def program(read_signal: ReadSignal) -> int | None:
        study_config = config.read_command_line(words)
        from experiments.study import study  # slow: imports jax

        return study.run_study(study_config, words, read_signal)

    return run_guarded(program)
