"""The processes that one command starts on its own machine."""

from dataclasses import dataclass, field
from typing import Any

from experiments.launch.addresses import free_port
from experiments.launch.supervisor.child import Child
from experiments.launch.supervisor.group import Log, Placement
from experiments.launch.supervisor.limits import Limits
from experiments.launch.supervisor.process_status import ProcessStatus


@dataclass
class LocalProcesses:
    """Child processes of this command; see `Processes`.

    Attributes:
        count: the number of processes.
        command: the argv of each process.
        limits: limits on waiting and restarts.
        log: prints a line.
    """

    count: int
    command: list[str]
    limits: Limits
    log: Log
    _children: list[Child] = field(default_factory=list)

    def gather(self, now: float) -> Placement:
        """Returns places on this machine, with a port that is free now."""
        # A new port for each start: the last one may still be in use.
        return Placement(f"127.0.0.1:{free_port()}", [()] * self.count)

    def start(self, attributes: list[dict[str, Any]]) -> None:
        """Starts all processes, once the earlier ones are gone."""
        self.kill()
        self._children = [Child(self.command, given, self.log) for given in attributes]

    def poll(self, now: float) -> list[ProcessStatus]:
        """Returns the status of each process."""
        for child in self._children:
            child.poll(now, self.limits)
        return [child.status for child in self._children]

    def signal(self, number: int) -> None:
        """Passes a signal on to each process."""
        for child in self._children:
            child.signal(number)

    def kill(self) -> None:
        """Kills and reaps all processes, and the processes they started."""
        # Process 0 last: it runs jax's service, without which the others abort.
        for child in reversed(self._children):
            child.kill()
        for child in self._children:
            child.reap()
        self._children = []

    close = kill
