"""A lock on the folder of a run or a study: one command at a time writes there."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from experiments.cli.errors import BadRequest
from experiments.cli.exits import say
from experiments.cli.signals import before_the_end

try:
    import fcntl
except ImportError:  # Windows: there the user sees to it
    fcntl = None

NAME = ".lock"  # in --out
LONGEST = 200  # characters of what is said of a holder


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Holds a folder, made if needed, until the end of the process at the latest.

    Folders that it made are removed again if they stay empty. A process that is killed
    leaves the file, but no lock.

    Raises:
        BadRequest: another command holds the folder, or it cannot be written to.
    """
    missing = []
    try:
        missing += [x for x in (out, *out.absolute().parents) if not x.exists()]
        out.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(out)
    except OSError as error:
        _remove(missing)
        raise BadRequest(f"--out {out}: {error.strerror}") from error

    def release():
        with suppress(OSError):  # such as: it is read-only now
            if _is_at(descriptor, out / NAME):
                (out / NAME).unlink()
        os.close(descriptor)
        _remove(missing)

    with before_the_end(release):
        yield


def _locked(out: Path) -> int:
    """Locks a file in a folder, which names its holder; returns its descriptor."""
    path = out / NAME
    while not _is_at(descriptor := _opened(path, out), path):
        os.close(descriptor)  # its holder has just removed it
    with suppress(OSError):  # a full disk
        path.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
    return descriptor


def _opened(path: Path, out: Path) -> int:
    """Opens and locks a file."""
    if _is_odd(path):  # to open a FIFO would wait for ever
        raise BadRequest(f"{path} is no file: remove it, or take another folder")
    # Read-only if possible: a file open to be written keeps its disk from a remount.
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    if _needs_writing(descriptor):
        os.close(descriptor)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor)
    except BlockingIOError:
        holder = os.read(descriptor, LONGEST).decode(errors="replace")
        os.close(descriptor)
        raise BadRequest(
            f"--out {out}: another command writes there ({holder or 'it just began'}): "
            "wait for its end, or take another folder"
        ) from None
    except OSError as error:  # not every file system has locks
        say(
            f"--out {out} cannot be locked ({error.strerror}): start no other command "
            "that writes there"
        )
    return descriptor


def _is_odd(path: Path) -> bool:
    """Whether something is there that is no file."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _needs_writing(descriptor: int) -> bool:
    """Whether the file system locks only files that are open to be written (NFS)."""
    try:
        _lock(descriptor)
    except OSError as error:
        return error.errno == errno.EBADF
    return False


def _lock(descriptor: int) -> None:
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove(folders: list[Path]) -> None:
    """Removes folders, the innermost first, up to one that holds something."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
