"""Compares algorithms: `python -m experiments.compare --algos sync_sgd,bmuf`."""

# PYTHON_ARGCOMPLETE_OK

import sys
from types import ModuleType
from typing import Any

from experiments.command import flags
from experiments.command.errors import guarded
from experiments.command.stopping import Stopped
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
    argv = sys.argv[1:] if argv is None else argv

    def program(stopped: Stopped) -> int | None:
        asked = config.read(argv)
        from experiments.study import study  # slow: imports jax

        return study.run(asked, argv, stopped)

    return guarded(program)


class _Command(ModuleType):
    """This module made callable: importing it hides the function of the same name."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Compares algorithms: see `experiments.api.compare`."""
        from experiments import api

        return api.compare(*arguments, **named)


sys.modules[__name__].__class__ = _Command

if __name__ == "__main__":
    flags.complete(lambda words: config.parser())
    sys.exit(main())
