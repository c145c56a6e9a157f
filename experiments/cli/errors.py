"""Errors for the user, in one line."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments import exit_codes
from experiments.exit_codes import Terminated

STANDARD = Path(os.__file__).parent  # Python's own library


class BadRequest(Exception):
    """A request that cannot be met; the message is one line."""

    code = exit_codes.BAD_REQUEST


class MayPass(BadRequest):
    """A request that cannot be met now, but may succeed later."""

    code = exit_codes.TERMINATED


def explain(where: str, error: BaseException) -> BadRequest:
    """Returns an error in a user's own code as a BadRequest, with file and line.

    A ValueError of ours explains itself, and gets no file and line.
    """
    first, at = str(error).partition("\n")[0], place(error)
    is_ours = isinstance(error, ValueError) and not at
    what = first if is_ours else f"{type(error).__name__}: {first}{at}"
    return BadRequest(f"{where}: {what}")


@contextmanager
def explained(flag: str, name: str) -> Iterator[None]:
    """Explains errors raised inside, except for the ValueErrors of our own factories.

    Args:
        flag: algo or task.
        name: the flag's value. A custom factory has a colon in it, and may raise
            anything.
    """
    try:
        yield
    except (BadRequest, Terminated):
        raise
    # A user's factory may end the program, as argparse does: that is an error here.
    except (Exception, SystemExit) as error:
        if ":" not in name and isinstance(error, ValueError):
            raise
        raise explain(f"--{flag} {name}", error) from error


def place(error: BaseException) -> str:
    """Returns the innermost line of the user's own code, as the end of a message."""
    ours = str(Path(__file__).parents[2])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        foreign = "site-packages" in path.parts or not path.exists()
        foreign = foreign or path.is_relative_to(STANDARD)
        packaged = frame.filename.startswith(
            (f"{ours}/experiments", f"{ours}/syncalgos")
        )
        if not (foreign or packaged):
            return f" ({path.name}:{frame.lineno} in {frame.name})"
    return ""
