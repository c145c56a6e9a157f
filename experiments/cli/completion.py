"""Shell completion of a command line, through argcomplete."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from experiments.cli.factories import ALGORITHM, TASK


def answer(parser_of: Callable[[list[str]], argparse.ArgumentParser]) -> None:
    """Prints the possible next words and ends the process, if a shell asks for them.

    Args:
        parser_of: takes the words so far, and returns a parser with their flags.
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argcomplete
    from argcomplete.completers import ChoicesCompleter, FilesCompleter

    parser = parser_of(os.environ["COMP_LINE"].split())
    names = {kind.flag: [*kind.files] for kind in (ALGORITHM, TASK)}
    for action in parser._actions:
        choices = names.get(action.dest) or _choices(action)
        # A completer is set even without choices: argcomplete would offer files.
        completer = ChoicesCompleter(dict.fromkeys(choices, ""))
        if action.type is Path:
            completer = FilesCompleter()
        setattr(action, "completer", completer)  # noqa: B010  argcomplete looks there
    argcomplete.autocomplete(parser)


def _choices(action: argparse.Action) -> list[str]:
    """Returns the choices that --help shows in braces."""
    shown = action.metavar if isinstance(action.metavar, str) else ""
    return shown.strip("{}").split(",") if shown.startswith("{") else []
