"""The processes that a leader decides for, wherever they run."""

from typing import NamedTuple, Protocol

from experiments.launch.supervisor.group import Start
from experiments.launch.supervisor.process_status import ProcessStatus


class Unplaced(Exception):
    """A run has no place, and will find none; the message is one line for the user."""


class Placement(NamedTuple):
    """The places of an attempt's processes; its fields are those of `Start`."""

    jax_coordinator: str
    hosts: int
    places: list[tuple[int, int, int]]
    names: list[str | None]


class Processes(Protocol):
    """Starts the processes of a run, and reports on them; blocks only to kill them."""

    def gather(self, now: float) -> Placement | None:
        """Finds where the next attempt runs.

        Args:
            now: time.monotonic().

        Returns:
            The places; None while some are missing.

        Raises:
            Unplaced: there will be none, such as after the loss of the scheduler.
        """
        ...

    def start(self, start: Start) -> None:
        """Starts all processes of an attempt; the earlier ones are gone."""
        ...

    def poll(self, now: float) -> None:
        """Updates the status of each process."""
        ...

    def statuses(self) -> list[ProcessStatus]:
        """The status of each process."""
        ...

    def gone(self) -> dict[int, str]:
        """Processes whose host is lost, and the reason in words.

        Raises:
            Unplaced: all places are lost.
        """
        ...

    def signal(self, number: int) -> None:
        """Passes a signal on to each process."""
        ...

    def kill(self) -> None:
        """Kills all processes; returns once each is gone, or its host is."""
        ...

    def close(self) -> None:
        """Gives up what was held for them, such as connections."""
        ...
