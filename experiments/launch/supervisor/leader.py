"""Runs the processes of a run to their end: when they start, start again and end."""

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

from experiments.exit_codes import (
    TERMINATED,
    UNCONNECTED,
    decide,
    handling,
    stopped_by,
)
from experiments.launch.supervisor import failure_policy
from experiments.launch.supervisor.group import Log, Processes, Rules, Unplaced
from experiments.launch.supervisor.process_status import (
    ProcessStatus,
    TrackedProcess,
    ready,
    silence_line,
)

RETRIES = 2  # of jax's start-up
TICK = 0.03  # seconds between two looks


def run_processes(
    processes: Processes, announced: dict[str, Any], rules: Rules, log: Log
) -> int:
    """Starts, watches and restarts processes until they end.

    No process is left behind in any case.

    Args:
        processes: on this machine, or on others; each calls
            `child_side.join_supervisor`.
        announced: the values that this command sends to all; JSON, below 100 kB.
        rules: limits on waiting and restarts.
        log: shows the user a line, which may hold any text.

    Returns:
        The exit code: that of the processes; 4 if they did not find each other; 75 if
        one was lost, or SIGTERM or SIGHUP came; 130 by Ctrl-C.
    """
    # In processes of their own: jax aborts in C++ when another one is lost, and hangs
    # when one never comes. Exit code, last line and signals stay with this command.
    leader = Leader(processes, announced, rules, log)
    received: list[int] = []
    with handling(lambda number, _: received.append(number)), closing(processes):
        while leader.code is None:
            time.sleep(TICK)
            asked = [received.pop(0) for _ in received[:]]
            leader.tick(time.monotonic(), asked)
        return decide(leader.code)


class Leader:
    """Decides for the processes of a run.

    Attributes:
        code: the exit code; None while the run goes on.
    """

    def __init__(
        self, processes: Processes, announced: dict[str, Any], rules: Rules, log: Log
    ):
        self.code: int | None = None
        self._processes = processes
        self._announced = announced
        self._rules = rules
        self._log = log
        self._tracked: dict[int, TrackedProcess] = {}  # none while places are missing
        self._since = time.monotonic()  # the last start
        self._serial = self._restarts = self._retries = 0
        self._address = ""  # of jax's service
        self._asked: int | None = None  # the signal that was passed on
        self._warned: set[tuple[int, str, int | None]] = set()

    def tick(self, now: float, asked: Sequence[int] = ()) -> None:
        """Updates the state of all processes, and acts; call it often.

        Args:
            now: time.monotonic().
            asked: signals that have come; reports that are older count before them.
        """
        try:
            statuses = self._processes.poll(now) if self._tracked else []
            for number in asked:
                self._signal(number, statuses)
            if self.code is not None:
                return
            if self._tracked:
                self._watch(statuses, now)
            else:
                self._gather(now)
        except Unplaced as error:
            self._end(TERMINATED if self._serial else UNCONNECTED, [str(error)])

    def _signal(self, number: int, statuses: Sequence[ProcessStatus]) -> None:
        """Passes a first signal on; ends at once on a second one."""
        if self._tracked and ready(statuses) and self._asked is None:
            self._asked = number
            self._processes.signal(number)
        elif self.code is None:
            self._end(stopped_by(self._asked or number), [])

    def _gather(self, now: float) -> None:
        """Starts all processes once there are places for them."""
        placement = self._processes.gather(now)
        if placement is None:
            return
        self._serial += 1
        self._address = placement.jax_coordinator
        self._tracked = {
            process: TrackedProcess(ProcessStatus(process, 0), name, now)
            for process, name in enumerate(placement.names)
        }
        self._since, self._warned = now, set()
        attributes = placement.attributes(
            attempt=self._restarts,
            announced=self._announced,
            init_timeout=self._rules.init_timeout,
        )
        self._processes.start(self._serial, attributes)

    def _watch(self, statuses: Sequence[ProcessStatus], now: float) -> None:
        """Decides how the run goes on, and acts."""
        for status in statuses:
            known = self._tracked[status.process]
            if known.status == status or known.status.gone:
                continue
            self._tracked[status.process] = after = known.updated(status, now)
            if line := silence_line(after, known.status, self._rules.silence):
                self._log(line)
        group = list(self._tracked.values())
        stuck = failure_policy.stuck_lines(group, now, self._rules.stuck)
        self._say(line for key, line in stuck.items() if key not in self._warned)
        self._warned |= stuck.keys()
        decision = failure_policy.decide(group, self._asked, now, self._rules)
        late = failure_policy.connect_timeout_line(group, now, self._rules.init_timeout)
        if decision is None and late is not None:
            self._end(UNCONNECTED, [f"{late} ({self._address})"])
        elif decision is not None and decision.kind == "lost":
            self._restart(decision.lines)
        elif decision is not None and decision.kind == "unconnected":
            self._reconnect(decision.lines, now)
        elif decision is not None:
            self._end(decision.code, decision.lines)

    def _restart(self, lines: list[str]) -> None:
        """Starts all processes again, from their checkpoint, or ends the run."""
        limit = self._rules.max_restarts
        if self._restarts >= limit:
            self._end(TERMINATED, lines)
            return
        self._restarts += 1
        self._retries = 0
        self._again([*lines, f"restart {self._restarts} of {limit}"])

    def _reconnect(self, lines: list[str], now: float) -> None:
        """Tries jax's start-up again on another port."""
        # Between the search for a free port and its use another program may take it.
        lines = [f"{line}, while connecting through {self._address}" for line in lines]
        quick = now - self._since < self._rules.init_timeout
        if self._retries >= RETRIES or not quick:
            self._end(UNCONNECTED, lines)
            return
        self._retries += 1
        self._again([*lines, "trying another port"])

    def _again(self, lines: list[str]) -> None:
        """Looks for places again: a lost host may have to be replaced."""
        self._say(lines)
        self._processes.kill()
        self._tracked = {}

    def _end(self, code: int, lines: list[str]) -> None:
        self._processes.kill()
        self._say(lines)
        self.code = code

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._log(line)
