"""Who takes part in a run, by which rules, and what a start tells all of them."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Group:
    """The processes of a run, and those of them that this command starts.

    Attributes:
        count: how many there are in all.
        ids: those that this command starts.
        coordinator: HOST:PORT of process 0's command; None if this command starts all.
    """

    count: int
    ids: tuple[int, ...]
    coordinator: str | None = None


class Rules(NamedTuple):
    """How long to wait, in seconds, and how often to start again.

    Attributes:
        init_timeout: for all processes to find each other.
        max_restarts: how many lost processes a run survives.
        silence: without a sign of life until the user is told.
        loss: without a sign of life until a process, or a host, counts as lost.
        stuck: that processes wait for one of them until the user is told.
    """

    init_timeout: float = 60.0
    max_restarts: int = 0
    silence: float = 3.0
    loss: float = 20.0
    stuck: float = 30.0


class Start(NamedTuple):
    """What all processes are told at a start.

    Attributes:
        serial: number of the start: reports of an earlier one are stale.
        attempt: how many restarts there were.
        jax_coordinator: host:port where jax's own coordination service shall run.
        hosts: how many hosts the processes run on.
        places: of each process: its number, its number among those on its host, and
            how many those are.
        announced: what process 0 tells all.
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
