"""Runs the processes of a run to their end: starts, restarts and stops them."""

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
from experiments.launch.supervisor.failure_policy import Decision
from experiments.launch.supervisor.group import Log, Processes, Unplaced
from experiments.launch.supervisor.limits import Limits
from experiments.launch.supervisor.process_status import (
    ProcessStatus,
    TrackedProcess,
    ready,
    silence_line,
)

RETRIES = 2  # attempts to repeat jax's start-up
TICK = 0.03  # seconds between two polls


def run_processes(
    processes: Processes, announced: dict[str, Any], limits: Limits, log: Log
) -> int:
    """Starts, watches and restarts processes until they end.

    All processes are gone when this returns or raises.

    Args:
        processes: processes on this machine or on others; each calls
            `child_side.join_supervisor`.
        announced: values that this command sends to all processes; JSON below 100 kB.
        limits: limits on waiting and restarts.
        log: shows the user a line of text.

    Returns:
        The exit code: that of the processes; 4 if they did not find each other; 75 if
        one was lost, or after SIGTERM or SIGHUP; 130 after Ctrl-C.
    """
    # Separate processes: jax aborts in C++ when another process is lost, and hangs when
    # one never starts. This command keeps control of exit code, last line and signals.
    leader = Leader(processes, announced, limits, log)
    received: list[int] = []
    with handling(lambda number, _: received.append(number)), closing(processes):
        while leader.code is None:
            time.sleep(TICK)
            asked = [received.pop(0) for _ in received[:]]
            leader.tick(time.monotonic(), asked)
        return decide(leader.code)


class Leader:
    """Starts, restarts and stops the processes of a run.

    Attributes:
        code: the exit code; None while the run continues.
    """

    def __init__(
        self, processes: Processes, announced: dict[str, Any], limits: Limits, log: Log
    ):
        self.code: int | None = None
        self._processes = processes
        self._announced = announced
        self._limits = limits
        self._log = log
        self._tracked: list[TrackedProcess] = []  # empty while places are missing
        self._since = time.monotonic()  # time of the last start
        self._restarts = self._retries = self._hosts = 0
        self._address = ""  # of jax's service at the last start
        self._asked: int | None = None  # the signal passed on to the processes
        self._warned: set[tuple[int, str, int | None]] = set()

    def tick(self, now: float, asked: Sequence[int] = ()) -> None:
        """Updates the state of all processes and acts on it; call it often.

        Args:
            now: time.monotonic().
            asked: signals received; earlier reports are handled before them.
        """
        try:
            statuses = self._processes.poll(now) if self._tracked else []
            for number in asked:
                self._signal(number, statuses)
            if self.code is None and self._tracked:
                self._watch(statuses, now)
            elif self.code is None:
                self._gather(now)
        except Unplaced as error:
            self._end(TERMINATED if self._address else UNCONNECTED, [str(error)])

    def _signal(self, number: int, statuses: Sequence[ProcessStatus]) -> None:
        """Passes a first signal on; ends at once on a second one."""
        if self._tracked and ready(statuses) and self._asked is None:
            self._asked = number
            self._processes.signal(number)
        elif self.code is None:
            # Process 0 has written all files by then.
            decided = statuses[0].decided if statuses else None
            code = stopped_by(self._asked or number) if decided is None else decided
            self._end(code, [])

    def _gather(self, now: float) -> None:
        """Starts all processes once there are places for them."""
        placement = self._processes.gather(now)
        if placement is None:
            return
        self._address = placement.jax_coordinator
        # Some algorithms form groups by the number of hosts: a restart on other hosts
        # must not change the results.
        self._hosts = self._hosts or len(set(placement.hosts))
        self._tracked = [
            TrackedProcess(ProcessStatus(process, 0), "".join(host[:1]), now)
            for process, host in enumerate(placement.hosts)
        ]
        self._since, self._warned = now, set()
        attributes = placement.attributes(
            hosts=self._hosts,
            attempt=self._restarts,
            announced=self._announced,
            init_timeout=self._limits.init_timeout,
        )
        self._processes.start(attributes)

    def _watch(self, statuses: Sequence[ProcessStatus], now: float) -> None:
        """Decides how the run continues, and acts."""
        for status in statuses:
            known = self._tracked[status.process]
            if known.status == status or known.status.gone:
                continue
            self._tracked[status.process] = after = known.updated(status, now)
            if line := silence_line(after, known.status, self._limits.warned_after):
                self._log(line)
        group = self._tracked
        stuck = failure_policy.stuck_lines(group, now, self._limits.stuck_after)
        self._say(line for key, line in stuck.items() if key not in self._warned)
        self._warned |= stuck.keys()
        decision = failure_policy.decide(group, self._asked, now, self._limits)
        seconds = self._limits.init_timeout
        late = failure_policy.connect_timeout_line(group, now, seconds)
        if decision is None and late is not None:
            self._end(UNCONNECTED, [f"{late} ({self._address})"])
        elif decision is not None and decision.kind == "end":
            self._end(decision.code, decision.lines)
        elif decision is not None:
            self._again(decision, now)

    def _again(self, decision: Decision, now: float) -> None:
        """Restarts all after a loss or a failed start of jax, or ends the run."""
        lines = decision.lines
        if decision.kind == "lost":
            limit = self._limits.max_restarts
            is_allowed = self._restarts < limit
            self._restarts, self._retries = self._restarts + 1, 0
            action = f"restart {self._restarts} of {limit}"
        else:
            # Another program may take the free port before jax uses it.
            where = f", while connecting through {self._address}"
            lines = [f"{line}{where}" for line in lines]
            is_quick = now - self._since < self._limits.init_timeout
            is_allowed = is_quick and self._retries < RETRIES
            self._retries += 1
            action = "trying another port"
        if not is_allowed:
            self._end(decision.code, lines)
            return
        self._say([*lines, action])
        self._processes.kill()
        self._tracked = []  # a lost host may have to be replaced

    def _end(self, code: int, lines: list[str]) -> None:
        self._processes.kill()
        self._say(lines)
        self.code = code

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._log(line)
