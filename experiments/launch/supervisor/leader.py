"""Decides for a run: when its processes start, start again and end."""

import time
from collections.abc import Iterable
from typing import Any, Literal

from experiments.exit_codes import TERMINATED, UNCONNECTED, stopped_by
from experiments.launch.supervisor import failure_policy
from experiments.launch.supervisor.group import Log, Rules, Start
from experiments.launch.supervisor.process_status import (
    ProcessStatus,
    TrackedProcess,
    ready,
    silence_line,
)
from experiments.launch.supervisor.processes import Placement, Processes, Unplaced

RETRIES = 2  # of jax's start-up


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
        self._tracked: dict[int, TrackedProcess] = {}
        self._stage: Literal["gather", "run"] = "gather"
        self._since = time.monotonic()  # the stage began
        self._serial = self._restarts = self._retries = 0
        self._address = ""  # of jax's service
        self._asked: int | None = None  # the signal that was passed on
        self._warned: set[tuple[int, str, int | None]] = set()

    def signal(self, number: int) -> None:
        """Passes a first signal on; ends at once on a second one."""
        is_ready = self._stage == "run" and ready(self._processes.statuses())
        if is_ready and self._asked is None:
            self._asked = number
            self._processes.signal(number)
        else:
            self._end(stopped_by(self._asked or number), [])

    def tick(self, now: float) -> None:
        """Updates the state of all processes, and acts; call it often."""
        try:
            if self._stage == "gather":
                self._gather(now)
            else:
                self._watch(now)
        except Unplaced as error:
            self._end(TERMINATED if self._serial else UNCONNECTED, [str(error)])

    def _gather(self, now: float) -> None:
        """Starts all processes once there are places for them."""
        placement = self._processes.gather(now)
        if placement is not None:
            self._start(placement, now)

    def _start(self, placement: Placement, now: float) -> None:
        self._serial += 1
        self._address = placement.jax_coordinator
        start = Start(self._serial, self._restarts, self._announced, *placement)
        self._tracked = {
            process: TrackedProcess(ProcessStatus(process, 0), name, now)
            for (process, *_), name in zip(start.places, start.names, strict=True)
        }
        self._stage, self._since = "run", now
        self._warned = set()
        self._processes.start(start)

    def _update(self, now: float) -> None:
        """Applies the last reports on all processes."""
        for process, reason in self._processes.gone().items():
            if (known := self._tracked[process]).alive:
                self._tracked[process] = known._replace(gone=reason, ended=now)
        for status in self._processes.statuses():
            known = self._tracked[status.process]
            if known.status == status or known.gone is not None:
                continue
            self._tracked[status.process] = after = known.updated(status, now)
            if line := silence_line(after, known.status, self._rules.silence):
                self._log(line)

    def _watch(self, now: float) -> None:
        """Decides how the run goes on, and acts."""
        self._update(now)
        group = list(self._tracked.values())
        stuck = failure_policy.stuck_lines(group, now, self._rules.stuck)
        self._say(line for key, line in stuck.items() if key not in self._warned)
        self._warned |= stuck.keys()
        decision = failure_policy.decide(group, self._asked, now, self._rules)
        late = failure_policy.connect_timeout_line(group, now, self._rules.init_timeout)
        if decision is None and late is not None:
            self._end(UNCONNECTED, [f"{late} ({self._address})"])
        elif decision is not None and decision.kind == "lost":
            self._restart(decision.lines, now)
        elif decision is not None and decision.kind == "unconnected":
            self._reconnect(decision.lines, now)
        elif decision is not None:
            self._end(decision.code, decision.lines)

    def _restart(self, lines: list[str], now: float) -> None:
        """Starts all processes again, from their checkpoint, or ends the run."""
        limit = self._rules.max_restarts
        if self._restarts >= limit:
            self._end(TERMINATED, lines)
            return
        self._restarts += 1
        self._retries = 0
        self._again([*lines, f"restart {self._restarts} of {limit}"], now)

    def _reconnect(self, lines: list[str], now: float) -> None:
        """Tries jax's start-up again on another port."""
        # Between the search for a free port and its use another program may take it.
        lines = [f"{line}, while connecting through {self._address}" for line in lines]
        quick = now - self._since < self._rules.init_timeout
        if self._retries >= RETRIES or not quick:
            self._end(UNCONNECTED, lines)
            return
        self._retries += 1
        self._again([*lines, "trying another port"], now)

    def _again(self, lines: list[str], now: float) -> None:
        """Looks for places again: a lost host may have to be replaced."""
        self._say(lines)
        self._processes.kill()
        self._stage, self._since = "gather", now

    def _end(self, code: int, lines: list[str]) -> None:
        self._processes.kill()
        self._say(lines)
        self.code = code

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._log(line)
