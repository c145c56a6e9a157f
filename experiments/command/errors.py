"""Errors for the user, in one line, and the frame of all commands that shows them."""

import atexit
import errno
import gc
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.command import stopping
from experiments.command.stopping import ReadSignal, Terminated

ROOT = Path(__file__).parents[2]
# Python's own library, and ours.
NOT_THE_USERS = (Path(os.__file__).parent, ROOT / "experiments", ROOT / "syncalgos")
LONGEST = 2000  # characters of an error's text
# A user's code may raise anything; these alone are not its errors.
STOPS = KeyboardInterrupt, Terminated


class BadRequest(Exception):
    """A request that cannot be met; the message is one line."""

    code = stopping.BAD_REQUEST


class MayPass(BadRequest):
    """A request that cannot be met now, but may succeed later."""

    code = stopping.TERMINATED


class Unwritten(BadRequest):
    """Outputs that were asked for and could not be written; all else is done.

    Attributes:
        result: what the call would have returned; None for a command.
    """

    code = stopping.FAILED

    def __init__(self, line: str, result: Any = None):
        super().__init__(line)
        self.result = result


# What another attempt at the same request meets again. All other errors of the system,
# such as those of a full disk or of a server that is away, may pass.
_LASTING = {
    errno.EACCES,
    errno.EEXIST,
    errno.EINVAL,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENODEV,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENXIO,
    errno.EPERM,
    errno.EROFS,
}


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later, after this error of the system."""
    return isinstance(error, OSError) and error.errno not in _LASTING


def refusal(error: OSError, line: str) -> BadRequest:
    """Returns the error of a request that an error of the system has ended.

    Args:
        error: the error of the system.
        line: the text for the user.

    Returns:
        A MayPass (exit code 75) if another attempt may succeed, else a BadRequest (2).
    """
    return MayPass(line) if may_pass(error) else BadRequest(line)


@contextmanager
def refusing(subject: str = "") -> Iterator[None]:
    """Makes a ValueError raised inside a BadRequest, which begins with its subject."""
    try:
        yield
    except ValueError as error:
        raise BadRequest(f"{subject}: {error}" if subject else str(error)) from error


def check_working_folder() -> None:
    """Raises a BadRequest if the working folder was removed."""
    try:
        os.getcwd()
    except OSError as error:
        raise BadRequest(
            f"the working folder cannot be used: {error.strerror}: go to another"
        ) from error


def explain(where: str, error: BaseException) -> BadRequest:
    """Returns an error in a user's own code as a BadRequest, with file and line.

    A ValueError of ours explains itself, and gets no file and line.
    """
    place_text = place(error)
    # Those of jax, about frames that it left out, begin with a line of dashes.
    notes = [x for x in getattr(error, "__notes__", []) if not x.startswith("-")]
    reason = "; ".join([summarize_error(error), *notes]) + place_text
    if isinstance(error, ValueError) and not place_text:
        reason = error_text(error).partition("\n")[0]
    elif isinstance(error, OSError) and error.filename:
        reason = describe_os_error(error) + place_text
    return BadRequest(f"{where}: {reason}")


def summarize_error(error: BaseException) -> str:
    """Returns an error's kind, and the first line of its text."""
    return f"{type(error).__name__}: {error_text(error)}".partition("\n")[0]


def error_text(error: BaseException) -> str:
    """Returns the text of an error, or as much of it as anyone reads."""
    try:
        text = str(error)
    except BaseException as fault:  # a class of the user's may have any __str__
        text = f"its text cannot be shown ({type(fault).__name__})"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def describe_os_error(error: OSError) -> str:
    """Returns the file of an error, if it names one, and its reason."""
    reason = error.strerror or in_one_line(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def in_one_line(error: BaseException) -> str:
    """Returns the text of an error as one line."""
    return " ".join(error_text(error).split())


@contextmanager
def explaining_errors(flag: str, name: str) -> Iterator[None]:
    """Explains errors raised inside, except for the ValueErrors of our own factories.

    Args:
        flag: algo or task.
        name: the flag's value. A custom factory has a colon in it, and may raise
            anything.
    """
    try:
        yield
    except (BadRequest, *STOPS):
        raise
    # A user's factory may end the program, as argparse does: that is an error here.
    except BaseException as error:
        if ":" not in name and isinstance(error, ValueError):
            raise
        raise explain(f"--{flag} {name}", error) from error


def place(error: BaseException) -> str:
    """Returns the innermost line of the user's own code, as the end of a message."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_installed = "site-packages" in path.parts or not path.exists()
        if not (is_installed or any(path.is_relative_to(x) for x in NOT_THE_USERS)):
            return f" ({path.name}:{frame.lineno} in {frame.name})"
    return ""


def run_guarded(
    program: Callable[[ReadSignal], int | None], has_starter: bool = False
) -> int:
    """Runs a program: errors become one line, and a signal stops it gently.

    Args:
        program: takes a function that returns the signal that asks it to stop, and
            returns its exit code, or None if it stopped because of that signal.
        has_starter: whether another process of ours ends this one at a second signal. A
            scheduler may send the first signal to both.

    Returns:
        The exit code: 2 for a bad request, 75 for a stop by SIGTERM or SIGHUP, 130 for
        one by Ctrl-C.
    """
    # A run makes a million objects that stay. Collecting garbage among them after every
    # 700, and once more at the end, would take an eighth of the default run.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    stop = stopping.Stop(has_starter)
    with stopping.unfailing_output(), stopping.handling(stop.handle):
        try:
            check_working_folder()
            code = program(stop)
        except BadRequest as error:
            stopping.say(f"error: {in_one_line(error)}")
            code = error.code
        except OSError as error:
            # Without a file's name it is no matter of what the user asked for.
            if error.filename is None:
                raise
            stopping.say(f"error: {describe_os_error(error)}")
            code = refusal(error, "").code
        except KeyboardInterrupt:
            code = stopping.INTERRUPTED
        except Terminated:
            code = stopping.TERMINATED
        return stopping.decide(stopping.stop_code(stop()) if code is None else code)
