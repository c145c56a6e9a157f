"""The limits of supervised processes: of a run, of a cluster, and of a study's jobs."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits in seconds, and the number of restarts.

    Attributes:
        init_timeout: for all processes to find each other.
        max_restarts: lost processes that a run survives.
        warned_after: without a sign of life before the user is warned.
        lost_after: without a sign of life before a process, or a host, counts as lost.
        stuck_after: of waiting for one process before the user is warned.
    """

    init_timeout: float = 60.0
    # A loss is then exit code 75, which schedulers understand.
    max_restarts: int = 0
    warned_after: float = 3.0
    lost_after: float = 20.0
    stuck_after: float = 30.0
