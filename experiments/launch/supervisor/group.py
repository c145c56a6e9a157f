"""Values that all files about supervised processes share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Log = Callable[[str], None]
"""Shows the user a line."""


class Rules(NamedTuple):
    """Limits in seconds, and the number of restarts.

    Attributes:
        init_timeout: for all processes to find each other.
        max_restarts: lost processes that a run survives.
        silence: without a sign of life before the user is warned.
        loss: without a sign of life before a process, or a host, counts as lost.
        stuck: of waiting for one process before the user is warned.
    """

    init_timeout: float = 60.0
    # A loss is then exit code 75, which schedulers understand.
    max_restarts: int = 0
    silence: float = 3.0
    loss: float = 20.0
    stuck: float = 30.0


class Start(NamedTuple):
    """One start of all processes.

    Attributes:
        serial: number of the start; reports with an earlier one are stale.
        attempt: restarts before it.
        announced: the values that the command sends to all processes.
        jax_coordinator: host:port for jax's own coordination service, where process 0
            runs.
        hosts: the number of hosts.
        places: for each process: its number, its number on its host, and the number of
            processes on that host.
        names: for each process the name of its host; None if there is only one.
    """

    serial: int
    attempt: int
    announced: dict[str, Any]
    jax_coordinator: str
    hosts: int
    places: list[tuple[int, int, int]]
    names: list[str | None]

    def attributes(self, init_timeout: float) -> list[dict[str, Any]]:
        """Returns the attributes of each process's `ChildSide`.

        Args:
            init_timeout: seconds that jax may take to connect.
        """
        shared = {
            "processes": len(self.places),
            "hosts": self.hosts,
            "attempt": self.attempt,
            "jax_coordinator": self.jax_coordinator,
            "init_timeout": init_timeout,
            "announced": self.announced,
        }
        return [
            {**shared, "process": process, "local": local, "locals": locals_}
            for process, local, locals_ in self.places
        ]


def processes(ids: list[int]) -> str:
    """Names processes: process 1; processes 1, 2 and 3."""
    *most, last = [str(i) for i in sorted(ids)]
    return f"processes {', '.join(most)} and {last}" if most else f"process {last}"


def numbered(hosts: Sequence[tuple[str, ...]]) -> list[tuple[int, int, int]]:
    """Numbers the processes of each host.

    Args:
        hosts: of each process.

    Returns:
        For each process: its number, its number on its host, and the number of
        processes on that host.
    """
    return [
        (process, hosts[:process].count(host), hosts.count(host))
        for process, host in enumerate(hosts)
    ]
