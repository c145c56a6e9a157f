"""The processes that one command starts."""

import selectors

from experiments.supervisor.child import Child
from experiments.supervisor.group import Group, Rules, Start
from experiments.supervisor.process_status import Seen

UNREADY = ("start", "connect")  # phases in which a signal's handler may be lost


class Crew:
    """The processes that one command starts, as they are now."""

    def __init__(
        self,
        group: Group,
        command: list[str],
        rules: Rules,
        selector: selectors.BaseSelector,
    ):
        self._group = group
        self._command = command
        self._rules = rules
        self._selector = selector
        self._children: list[Child] = []

    def start(self, start: Start) -> None:
        """Starts all of them, once those of before are gone."""
        self.kill()
        group = self._group
        for process, local, locals_ in start.places:
            if process not in group.ids:
                continue
            told = {
                "process": process,
                "processes": group.count,
                "local": local,
                "locals": locals_,
                "hosts": start.hosts,
                "attempt": start.attempt,
                "jax_coordinator": start.jax_coordinator,
                "init_timeout": self._rules.init_timeout,
                "announced": start.announced,
            }
            prefixed = process > 0 and len(group.ids) > 1
            child = Child(self._command, told, prefixed, self._selector)
            self._children.append(child)

    def seen(self) -> list[Seen]:
        """What is known of each."""
        return [child.seen for child in self._children]

    def poll(self, now: float) -> None:
        """Looks after each."""
        for child in self._children:
            child.poll(now, self._rules)

    @property
    def ready(self) -> bool:
        """Whether all have started, and those that go on handle signals."""
        return bool(self._children) and all(
            seen.code is not None or seen.phase not in UNREADY for seen in self.seen()
        )

    def signal(self, number: int) -> None:
        """Passes a signal on to each."""
        for child in self._children:
            child.signal(number)

    def kill(self) -> None:
        """Kills and reaps all, and what they started."""
        for child in reversed(self._children):  # process 0 last: jax's service is there
            child.kill()
        for child in self._children:
            child.reap()
        self._children = []
