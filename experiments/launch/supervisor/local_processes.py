"""The processes that one command starts on its own machine."""

import socket
from dataclasses import dataclass, field

from experiments.launch.supervisor.child import Child
from experiments.launch.supervisor.group import Log, Rules, Start
from experiments.launch.supervisor.process_status import ProcessStatus
from experiments.launch.supervisor.processes import Placement


@dataclass
class LocalProcesses:
    """Child processes of this command; see `Processes`.

    Attributes:
        count: the number of processes.
        command: argv of one process.
        rules: limits.
        log: prints a line.
    """

    count: int
    command: list[str]
    rules: Rules
    log: Log
    _children: list[Child] = field(default_factory=list)

    def gather(self, now: float) -> Placement:
        """Returns places on this machine, with a port that is free now."""
        # Another one for each start: the last one's may linger, or have been taken.
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        places = [(i, i, self.count) for i in range(self.count)]
        return Placement(f"127.0.0.1:{port}", 1, places, [None] * self.count)

    def start(self, start: Start) -> None:
        """Starts all processes, once the earlier ones are gone."""
        self.kill()
        self._children = [
            Child(self.command, attributes, attributes["process"] > 0, self.log)
            for attributes in start.attributes(self.rules.init_timeout)
        ]

    def poll(self, now: float) -> None:
        """Updates the status of each process."""
        for child in self._children:
            child.poll(now, self.rules)

    def statuses(self) -> list[ProcessStatus]:
        """The status of each process."""
        return [child.status for child in self._children]

    def gone(self) -> dict[int, str]:
        """Nobody is lost with this machine who could still be reported."""
        return {}

    def signal(self, number: int) -> None:
        """Passes a signal on to each process."""
        for child in self._children:
            child.signal(number)

    def kill(self) -> None:
        """Kills and reaps all processes, and those that they started."""
        # Process 0 last: it runs jax's service, without which the others abort.
        for child in reversed(self._children):
            child.kill()
        for child in self._children:
            child.reap()
        self._children = []

    def close(self) -> None:
        """Holds nothing else."""
