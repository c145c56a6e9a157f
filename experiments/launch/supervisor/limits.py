"""Limits for the supervised processes of runs, clusters and study jobs."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits on waiting and on restarts.

    Attributes:
        init_timeout: seconds for all processes to find each other.
        max_restarts: the number of restarts after lost processes.
        warned_after: seconds without a sign of life before the user is warned.
        lost_after: seconds without a sign of life before a process or host counts as
            lost.
        stuck_after: seconds of waiting for one process before the user is warned.
    """

    init_timeout: float = 60.0
    # With 0, a loss ends with exit code 75, which schedulers understand.
    max_restarts: int = 0
    warned_after: float = 3.0
    lost_after: float = 20.0
    stuck_after: float = 30.0
