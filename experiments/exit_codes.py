"""Exit codes of the commands; imports nothing else of the project."""

import signal

DONE, FAILED, BAD_REQUEST, DIVERGED, UNCONNECTED = 0, 1, 2, 3, 4

# EX_TEMPFAIL of sysexits.h: schedulers take it for "queue the job again".
TERMINATED = 75
# 128 + SIGINT, as shells have it.
INTERRUPTED = 130


class Terminated(SystemExit):
    """SIGTERM arrived where an immediate end loses nothing, as in a download."""

    def __init__(self):
        super().__init__(TERMINATED)


def stopped_by(number: int) -> int:
    """The exit code of a program that a signal stopped."""
    return TERMINATED if number == signal.SIGTERM else INTERRUPTED
