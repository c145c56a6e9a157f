"""Trains or verifies an entry of the sync track: `python -m experiments.track`."""

# PYTHON_ARGCOMPLETE_OK

import argparse
import sys
from pathlib import Path

from experiments.command import flags
from experiments.command.errors import BadRequest, Unwritten, described, guarded
from experiments.command.stopping import Stopped
from experiments.command.words import whole

PROGRAM = "python -m experiments.track"


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the flags; None means those of the process.

    Returns:
        The exit code: 0 done, or the claim holds; 1 the claim does not hold, or a file
        could not be written; 2 bad request; 75 stopped by SIGTERM or SIGHUP; 130
        stopped by Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv

    def program(stopped: Stopped) -> int | None:
        asked = parser().parse_args(argv)
        if asked.command == "run" and asked.first_seed is not None:
            raise BadRequest("run takes no --first-seed: see --help")
        # They import jax, which is slow.
        from experiments.study import track
        from experiments.study.making import Stopped

        try:
            if asked.command == "run":
                return track.run(asked.entry, stopped)
            return track.verify(asked.entry, asked.first_seed, stopped)
        except Stopped:
            return None
        except OSError as error:
            raise Unwritten(described(error)) from error

    return guarded(program)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    about = "Train an entry of the sync track and log it, or verify its log."
    more = "The rules are in docs/track.md."
    made = flags.command_parser(PROGRAM, "", about, more, has_help_all=False)
    made.add_argument(
        "command",
        choices=("run", "verify"),
        metavar="{run,verify}",
        help="run: train, and write ENTRY.json; verify: train again, also on new seeds",
    )
    made.add_argument("entry", type=Path, metavar="ENTRY.py", help="file of the entry")
    made.add_argument(
        "--first-seed",
        type=whole,
        metavar="N",
        help="for verify: the first of the new seeds (default: drawn at random)",
    )
    return made


if __name__ == "__main__":
    flags.complete(lambda words: parser())
    sys.exit(main())
