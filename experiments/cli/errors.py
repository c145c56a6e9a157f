"""What a user is told when a request cannot be met."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.exit_codes import Terminated as Terminated


class BadRequest(Exception):
    """What the user asked for cannot be done; the message is one line."""


def explain(where: str, error: BaseException) -> BadRequest:
    """Returns what went wrong in a user's own code, in one line, with its place.

    A ValueError that comes from elsewhere is one of ours, and says all.
    """
    first, at = str(error).partition("\n")[0], place(error)
    is_ours = isinstance(error, ValueError) and not at
    what = first if is_ours else f"{type(error).__name__}: {first}{at}"
    return BadRequest(f"{where}: {what}")


@contextmanager
def explained(flag: str, name: str) -> Iterator[None]:
    """Explains what goes wrong inside, unless it is a ValueError of what is ours.

    Args:
        flag: that names an algorithm or a task, without dashes.
        name: its value; a user's own has a colon, and may raise anything.
    """
    try:
        yield
    except (BadRequest, Terminated):
        raise
    except (Exception, SystemExit) as error:
        if ":" not in name and isinstance(error, ValueError):
            raise  # it says all
        raise explain(f"--{flag} {name}", error) from error


def place(error: BaseException) -> str:
    """The innermost frame that is in the user's own file."""
    ours = str(Path(__file__).parents[2])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        foreign = "site-packages" in path.parts or not path.exists()
        packaged = frame.filename.startswith(
            (f"{ours}/experiments", f"{ours}/syncalgos")
        )
        if not (foreign or packaged or "importlib" in path.parts):
            return f" ({path.name}:{frame.lineno} in {frame.name})"
    return ""
