"""A lock on the folder of a run or a study: one command at a time writes there."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from experiments.command.errors import BadRequest
from experiments.command.stopping import before_the_end, say
from experiments.files import Damaged, make_folder, read_bytes, refuse_os_errors

NAME = ".lock"  # in --out
MAX_SHOWN = 200  # characters of the lock file that an error shows
WAIT = 0.1  # seconds; enough for a command that is about to end to remove its file
NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP  # file systems without locks


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Locks a folder, made if needed, until the end of the process at the latest.

    Folders made here are removed again if they stay empty. A killed process leaves the
    lock file behind, but the lock is released.

    Raises:
        BadRequest: another command holds the folder, or it cannot be written to.
    """
    path = out / NAME
    # The release may come from a signal, and the run from another thread.
    lock = FileLock(path, WAIT, thread_local=False, fallback_to_soft=False)

    def remove_file() -> None:
        with suppress(OSError):  # for example, the folder is read-only now
            path.unlink()

    with ExitStack() as cleanup:
        with refuse_os_errors("--out", out):
            cleanup.enter_context(make_folder(out))
            _acquire(lock, out)
        cleanup.callback(lock.release)
        cleanup.callback(remove_file)
        with suppress(OSError):  # a full disk
            path.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
        with before_the_end(cleanup.pop_all().close):
            yield


def _acquire(lock: FileLock, out: Path) -> None:
    """Locks a folder; prints a warning if its file system has no locks."""
    path = out / NAME
    with suppress(FileNotFoundError):  # one call, as the file may vanish between two
        if not stat.S_ISREG(path.stat().st_mode):  # reading a FIFO would never end
            raise BadRequest(f"{path} is not a file: remove it, or use another folder")
    try:
        lock.acquire()
    except Timeout:
        holder = ""
        with suppress(OSError, Damaged):  # it has just ended
            holder = read_bytes(path).decode(errors="replace")[:MAX_SHOWN]
        if not holder:
            holder = "just started"
        raise BadRequest(
            f"--out {out}: another command writes there ({holder}): wait until it "
            "ends, or use another folder"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        say(
            f"--out {out} cannot be locked ({error.strerror}): do not start another "
            "command that writes there"
        )
