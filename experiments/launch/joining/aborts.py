"""Turns jax's aborts into lines, which it surrounds by many of its own."""

import ctypes
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TextIO

from experiments.cli import exits, signals
from experiments.launch.supervisor.group import processes


def line_of(
    noise: str, where: str, count: int, seconds: float, loss: float
) -> str | None:
    """Turns what jax prints before it aborts into one line.

    Args:
        noise: all that native libraries printed.
        where: HOST:PORT of process 0.
        count: the number of processes.
        seconds: how long process 0 waits for all of them.
        loss: seconds without a sign of life before jax counts a process as lost.

    Returns:
        The line; None if it is not jax's service that ends this process.
    """
    _, found, status = noise.rpartition("absl::Status: ")
    if not found:
        return None
    if ids := _listed("timed out task names:", status):
        return f"process 0 at {where} waited {seconds:g} s for {ids} of {count}"
    if ids := _listed(r"stopped sending heartbeats\):", status):
        return f"{ids} gave no sign of life for {loss:g} s"
    if found := re.search(r"(\d+) unexpectedly tried to connect", status):
        return f"process {found[1]} was started twice"
    if found := re.search(r"Unexpected task registered with task=(\d+)", status):
        return f"process {found[1]} is none of those that process 0 waits for"
    if "/RegisterTask" in status:
        return (
            f"what listens at {where} does not take this process: it is no process 0 "
            "of this program, or has one of this number already"
        )
    if "RPC" in status:
        return f"process 0 at {where} is gone"
    return f"jax ends this process: {status.partition(chr(10))[0]}"


def _listed(title: str, text: str) -> str:
    """Names the processes that jax lists below a title, one a line; "" if none."""
    found = re.search(rf"{title}\n((?:\S*\d+ *\n)+)", text)
    lines = found[1].split() if found else []
    ids = [int(re.findall(r"\d+", line)[-1]) for line in lines]
    return processes(ids) if ids else ""


class Streams(NamedTuple):
    """The streams of a process whose libraries print where nobody looks.

    Attributes:
        errors: what the user sees.
        native: file of what libraries write to stderr.
    """

    errors: TextIO
    native: int

    def say(self, text: str) -> None:
        """Shows the user a line, from any process."""
        print(exits.printable(text), file=self.errors, flush=True)

    def noise(self) -> str:
        """Returns what libraries have printed."""
        size = os.fstat(self.native).st_size
        return os.pread(self.native, size, 0).decode(errors="replace")


@contextmanager
def own_streams(is_first: bool) -> Iterator[Streams]:
    """Keeps stdout and stderr to this program; only the first process prints.

    gloo prints its connections on stdout, and jax many lines before it aborts.

    Args:
        is_first: whether this is process 0.
    """
    before = sys.stdout, sys.stderr
    out, err = os.dup(1), os.dup(2)
    errors = exits.unfailing(err, sys.stderr.encoding)
    with open(os.devnull, "w") as nowhere, tempfile.TemporaryFile() as native:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(native.fileno(), 2)
        sys.stdout = exits.unfailing(out, sys.stdout.encoding) if is_first else nowhere
        sys.stderr = errors if is_first else nowhere

        def restore() -> None:
            os.dup2(err, 2)

        # stdout is not restored: C may still hold words for it.
        with signals.before_the_end(restore):
            yield Streams(errors, native.fileno())
        sys.stdout, sys.stderr = before


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


@contextmanager
def catching_aborts(take: Callable[[], None]) -> Iterator[None]:
    """Calls a function where this process would be aborted.

    jax aborts in C++ when another process is gone, and offers no way to prevent it:
    its `missed_heartbeat_callback` raises std::bad_cast (jaxlib 0.10.2).

    Args:
        take: ends the process; if it returns, the abort goes on.
    """
    # Not by the module signal: its handlers wait for the main thread, but the abort
    # goes on as soon as the handler in C returns.
    handler = _Handler(lambda number: take())
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
    set_handler.restype = ctypes.c_void_p
    set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGABRT, None)
