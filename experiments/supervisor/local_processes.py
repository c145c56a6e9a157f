"""The processes that one command starts."""

from dataclasses import dataclass, field

from experiments.supervisor.child import Child
from experiments.supervisor.group import Group, Log, Rules, Start
from experiments.supervisor.process_status import ProcessStatus

# Phases in which jax may replace the handler of a signal, which would be lost.
UNREADY = ("start", "connect")


@dataclass
class LocalProcesses:
    """The processes that one command starts.

    Attributes:
        group: all processes of the run.
        command: argv of one process.
        rules: limits.
        log: prints a line.
    """

    group: Group
    command: list[str]
    rules: Rules
    log: Log
    _children: list[Child] = field(default_factory=list)

    def start(self, start: Start) -> None:
        """Starts all processes, once the earlier ones are gone."""
        self.kill()
        shared = {
            "processes": self.group.count,
            "hosts": start.hosts,
            "attempt": start.attempt,
            "jax_coordinator": start.jax_coordinator,
            "init_timeout": self.rules.init_timeout,
            "announced": start.announced,
        }
        for process, local, locals_ in start.places:
            if process in self.group.ids:
                own = {"process": process, "local": local, "locals": locals_}
                is_prefixed = process > 0 and len(self.group.ids) > 1
                child = Child(self.command, shared | own, is_prefixed, self.log)
                self._children.append(child)

    def statuses(self) -> list[ProcessStatus]:
        """The status of each process."""
        return [child.status for child in self._children]

    def poll(self, now: float) -> None:
        """Updates the status of each process."""
        for child in self._children:
            child.poll(now, self.rules)

    @property
    def ready(self) -> bool:
        """Whether all have started, and those that run handle signals."""
        return bool(self._children) and all(
            status.code is not None or status.phase not in UNREADY
            for status in self.statuses()
        )

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
