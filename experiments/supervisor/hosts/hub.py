"""Process 0's supervisor: gathers the others and decides for all."""

import signal
import time
from typing import Any, Literal

from experiments.exit_codes import TERMINATED, UNCONNECTED, stopped_by
from experiments.supervisor import addresses, failure_policy
from experiments.supervisor.group import Start, processes
from experiments.supervisor.hosts.guests import Guests, Heard
from experiments.supervisor.hosts.rendezvous import Hello, places
from experiments.supervisor.local_processes import LocalProcesses
from experiments.supervisor.process_status import (
    ProcessStatus,
    TrackedProcess,
    silence_line,
)

FAREWELL = 3.0  # seconds for the others to receive the exit code and leave
RETRIES = 2  # of jax's start-up


class Hub:
    """Decides for all commands; starts its own processes.

    Attributes:
        code: the exit code; None while the run goes on.
    """

    def __init__(
        self,
        hello: Hello,
        coordinator: str | None,
        announced: dict[str, Any],
        local: LocalProcesses,
        guests: Guests | None,
    ):
        self.code: int | None = None
        self._hello = hello
        self._coordinator = coordinator
        self._announced = announced
        self._rules = local.rules
        self._local = local
        self._guests = guests
        self._tracked: dict[int, TrackedProcess] = {}
        self._stage: Literal["gather", "run", "end"] = "gather"
        self._since = time.monotonic()  # the stage began
        self._serial = self._restarts = self._retries = 0
        self._address = ""  # of jax's service
        self._signalled = False  # whether this command was asked to stop
        self._asked: int | None = None  # the signal that any command received
        self._warned: set[tuple[int, str, int | None]] = set()
        self._last = 0  # the exit code while the others leave

    def signal(self, number: int) -> None:
        """Passes a first signal on; ends at once on a second one."""
        if self._stage == "run" and self._local.ready and not self._signalled:
            self._signalled = True
            self._asked = number
            self._local.signal(number)
        elif self._stage != "end":
            line = f"process 0's command was stopped by {signal.Signals(number).name}"
            self._end(stopped_by(number), [], (TERMINATED, [line]))

    def tick(self, now: float) -> None:
        """Updates the state of all processes, and acts; call it often."""
        self._local.poll(now)
        if self._guests is not None:
            self._guests.tend(now)
            for heard in self._guests.heard():
                self._take(heard, now)
        if self._stage == "gather":
            self._gather(now)
        elif self._stage == "run":
            self._watch(now)
        elif (
            not (self._guests and self._guests.leaving) or now - self._since > FAREWELL
        ):
            self.code = self._last

    def close(self) -> None:
        """Closes all connections."""
        if self._guests is not None:
            self._guests.close()

    def _take(self, heard: Heard, now: float) -> None:
        """Applies a message of another command."""
        message = heard.message
        if self._stage == "end":
            return
        if "objection" in message:
            self._end(UNCONNECTED, [message["objection"]])
        elif "leaving" in message:
            self._end(TERMINATED, [message["leaving"]])
        elif "asked" in message:
            self._asked = message["asked"]
        elif "gone" in message:
            known = [self._tracked[i] for i in heard.ids if i in self._tracked]
            for process in (p for p in known if p.alive):
                lost = process._replace(gone=message["gone"], ended=now)
                self._tracked[process.status.process] = lost
        elif message.get("serial") == self._serial and self._stage == "run":
            self._update(ProcessStatus(**message["status"]), now)

    def _gather(self, now: float) -> None:
        """Starts once all commands are there; gives up after a while."""
        present = [self._hello, *(self._guests.hellos() if self._guests else [])]
        ids = {i for hello in present for i in hello.ids}
        missing = sorted({*range(self._hello.total)} - ids)
        seconds = self._rules.init_timeout
        if not missing:
            self._start(present, now)
        elif now - self._since > seconds:
            code = TERMINATED if self._serial else UNCONNECTED
            back = " to come back" if self._serial else ""
            line = (
                f"process 0 at {self._coordinator} waited {seconds:g} s for "
                f"{processes(missing)} of {self._hello.total}{back}"
            )
            self._end(code, [line])

    def _start(self, present: list[Hello], now: float) -> None:
        """Starts all processes, on all hosts."""
        self._serial += 1
        by_hand = self._coordinator is not None
        host, own = "127.0.0.1", "127.0.0.1"
        if self._coordinator is not None:
            host = addresses.address(self._coordinator)[0]
            own = addresses.own_address(host)
        # A free port of each start: the last one's may linger, or have been taken.
        self._address = addresses.joined_address(host, addresses.free_port(own))
        hosts, where = places(present)
        start = Start(
            serial=self._serial,
            attempt=self._restarts,
            jax_coordinator=self._address,
            hosts=hosts,
            places=where,
            announced=self._announced,
        )
        self._tracked = {
            i: TrackedProcess(
                ProcessStatus(i, 0), hello.host[0] if by_hand else None, now
            )
            for hello in present
            for i in hello.ids
        }
        self._stage, self._since = "run", now
        self._warned = set()
        if self._guests is not None:
            self._guests.late = True
            self._guests.send({"start": start._asdict()})
        self._local.start(start)

    def _update(self, status: ProcessStatus, now: float) -> None:
        """Applies a report of a process's status."""
        before = self._tracked[status.process]
        if before.status == status or before.gone is not None:
            return
        after = before.updated(status, now)
        self._tracked[status.process] = after
        if line := silence_line(after, before.status, self._rules.silence):
            self._log_everywhere(line)

    def _watch(self, now: float) -> None:
        """Decides how the run goes on, and acts."""
        for status in self._local.statuses():
            self._update(status, now)
        group = list(self._tracked.values())
        for key, line in failure_policy.stuck_lines(
            group, now, self._rules.stuck
        ).items():
            if key not in self._warned:
                self._warned.add(key)
                self._log_everywhere(line)
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
        """Gathers all commands again: a lost host may have to come back."""
        for line in lines:
            self._log_everywhere(line)
        if self._guests is not None:
            self._guests.send({"kill": True})
        self._local.kill()
        self._stage, self._since = "gather", now

    def _log_everywhere(self, line: str) -> None:
        """Prints a line in every command."""
        self._local.log(line)
        if self._guests is not None:
            self._guests.send({"say": line})

    def _end(
        self,
        code: int,
        lines: list[str],
        others: tuple[int, list[str]] | None = None,
    ) -> None:
        """Ends the run everywhere, for the `others` by their own code and lines."""
        if self._guests is not None:
            self._guests.dismiss(*(others or (code, lines)))
        self._local.kill()
        for line in lines:
            self._local.log(line)
        self._stage, self._since = "end", time.monotonic()
        self._last = code
