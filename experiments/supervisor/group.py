"""The processes of a run, the limits on them, and what each start sends to all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Log = Callable[[str], None]
"""Shows the user a line."""


@dataclass(frozen=True)
class Group:
    """The processes of a run, and those that this command starts.

    Attributes:
        count: the number of processes in all.
        ids: the processes that this command starts.
        coordinator: HOST:PORT of process 0's command; None if this command starts all.
    """

    count: int
    ids: tuple[int, ...]
    coordinator: str | None = None


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
        jax_coordinator: host:port for jax's own coordination service.
        hosts: the number of hosts.
        places: for each process: its number, its number on its host, and the number of
            processes on that host.
        announced: the values that process 0 sends to all.
    """

    serial: int
    attempt: int
    jax_coordinator: str
    hosts: int
    places: list[tuple[int, int, int]]
    announced: dict[str, Any]


def processes(ids: list[int]) -> str:
    """Names processes: process 1; processes 1, 2 and 3."""
    *most, last = [str(i) for i in sorted(ids)]
    return f"processes {', '.join(most)} and {last}" if most else f"process {last}"
