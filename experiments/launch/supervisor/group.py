"""Types and functions shared by all files about supervised processes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from experiments.launch.supervisor.process_status import ProcessStatus

Log = Callable[[str], None]
"""Shows the user a line."""


class Unplaced(Exception):
    """No place can be found for a run; the message is one line for the user."""


class Placement(NamedTuple):
    """The places of an attempt's processes.

    Attributes:
        jax_coordinator: host:port for jax's own coordination service, where process 0
            runs.
        hosts: for each process, values that identify its host, the name first; () if
            there is only one host.
    """

    jax_coordinator: str
    hosts: Sequence[tuple[str, ...]]

    def attributes(self, **shared: Any) -> list[dict[str, Any]]:
        """Returns the attributes of each process's `ChildSide`.

        Args:
            shared: attributes that do not depend on the places.
        """
        shared |= {"processes": len(self.hosts)}
        shared |= {"jax_coordinator": self.jax_coordinator}
        return [
            {**shared, "process": process, "local": local, "locals": locals_}
            for process, local, locals_ in numbered(self.hosts)
        ]


class Processes(Protocol):
    """Starts the processes of a run and reports on them; only kills block."""

    def gather(self, now: float) -> Placement | None:
        """Finds where the next attempt runs.

        Args:
            now: time.monotonic().

        Returns:
            The places; None while some are missing.

        Raises:
            Unplaced: no places will be found, for example after the loss of the
                scheduler.
        """
        ...

    def start(self, attributes: list[dict[str, Any]]) -> None:
        """Starts all processes of an attempt; earlier processes must be gone.

        Args:
            attributes: the attributes of each process's `ChildSide`.
        """
        ...

    def poll(self, now: float) -> list[ProcessStatus]:
        """Returns the status of each process.

        Raises:
            Unplaced: all places are lost.
        """
        ...

    def signal(self, number: int) -> None:
        """Passes a signal on to each process."""
        ...

    def kill(self) -> None:
        """Kills all processes; returns once each process or its host is gone."""
        ...

    def close(self) -> None:
        """Kills all processes and releases the resources held for them."""
        ...


def processes(ids: list[int]) -> str:
    """Names processes: process 1; processes 1, 2 and 3."""
    *most, last = [str(i) for i in sorted(ids)]
    return f"processes {', '.join(most)} and {last}" if most else f"process {last}"


def numbered(hosts: Sequence[tuple[str, ...]]) -> list[tuple[int, int, int]]:
    """Numbers the processes of each host.

    Args:
        hosts: the host of each process.

    Returns:
        For each process: its number, its number on its host, and the number of
        processes on that host.
    """
    return [
        (process, hosts[:process].count(host), hosts.count(host))
        for process, host in enumerate(hosts)
    ]
