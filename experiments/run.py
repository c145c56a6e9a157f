"""Trains one task by one algorithm: `python -m experiments.run --algo bmuf`."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper

from experiments import flags
from experiments.errors import BadRequest

DONE, BAD_REQUEST, DIVERGED, TERMINATED, INTERRUPTED = 0, 2, 3, 75, 130


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the flags; None means those of the process.

    Returns:
        The exit code: 0 done, 2 bad request, 3 diverged, 75 stopped by SIGTERM, 130
        stopped by Ctrl-C.
    """
    started = time.perf_counter()
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks × shows ?
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with _stop_signals() as stopped_by:
            request = flags.parse(argv)
            from experiments import job  # imports jax, which --help need not wait for

            outcome = job.run(request, argv, started, lambda: bool(stopped_by))
    except BadRequest as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_REQUEST
    except KeyboardInterrupt:
        return INTERRUPTED
    if outcome.diverged_at is not None:
        return DIVERGED
    if outcome.stopped:
        return TERMINATED if signal.SIGTERM in stopped_by else INTERRUPTED
    return DONE


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM; a second one ends the process at once."""
    received: list[int] = []

    def note(number, frame):
        if received:
            os._exit(TERMINATED if number == signal.SIGTERM else INTERRUPTED)
        received.append(number)
        print(
            "stopping after this dispatch; once more stops at once",
            file=sys.stderr,
            flush=True,
        )

    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
