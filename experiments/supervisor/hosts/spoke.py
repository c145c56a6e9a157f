"""The supervisor of other processes than 0, which obeys the hub."""

import selectors
import signal
import time
from typing import Any

from experiments.exit_codes import TERMINATED, UNCONNECTED, stopped_by
from experiments.supervisor.addresses import address
from experiments.supervisor.group import Start, processes
from experiments.supervisor.hosts.rendezvous import MARK, Dialer, Hello, greeting
from experiments.supervisor.hosts.wire import GARBAGE, Link
from experiments.supervisor.local_processes import LocalProcesses
from experiments.supervisor.process_status import ProcessStatus

BEAT = 1.0  # seconds between signs of life
FAREWELL = 0.5  # seconds for the hub to receive the last message


class Spoke:
    """Starts and watches its processes for the hub.

    Attributes:
        code: the exit code; None while the run goes on.
    """

    def __init__(
        self,
        hello: Hello,
        coordinator: str,
        local: LocalProcesses,
        selector: selectors.BaseSelector,
    ):
        self.code: int | None = None
        self._hello = hello
        self._coordinator = coordinator
        self._rules = local.rules
        self._local = local
        self._selector = selector
        self._dialer = Dialer(*address(coordinator))
        self._link: Link | None = None
        self._hub: str | None = None  # its host's name, once it has answered
        self._serial = 0  # of the last start
        self._sent: list[ProcessStatus] = []
        self._since = self._beaten = time.monotonic()  # the search for it; last beat
        self._rejoined = 0
        self._signalled = False

    @property
    def _me(self) -> str:
        return processes(self._hello.ids)

    def signal(self, number: int) -> None:
        """Passes a first signal on; ends at once on a second one."""
        if self._local.ready and not self._signalled:
            self._signalled = True
            self._send({"asked": number})
            self._local.signal(number)
            return
        name, host = signal.Signals(number).name, self._hello.host[0]
        self._send({"leaving": f"{self._me}'s command on {host} was stopped by {name}"})
        self._local.kill()
        self.code = stopped_by(number)

    def tick(self, now: float) -> None:
        """Updates the state of all processes, and reports; call it often."""
        self._local.poll(now)
        if self.code is not None:
            return
        if self._link is None:
            self._search(now)
        elif self._hub is None and now - self._since > self._rules.init_timeout:
            self._dialer.error = "what listens there does not answer"
            self._give_up()
        elif self._hub is not None and now - self._link.heard > self._rules.loss:
            self._part(f"silent for {self._rules.loss:g} s", now)
        else:
            self._report(now)

    def close(self) -> None:
        """Closes the connection once the hub has received the last message."""
        self._dialer.close()
        if self._link is not None:
            self._link.finish()
            self._link.sock.settimeout(FAREWELL)
            deadline = time.monotonic() + FAREWELL
            while self._link.closed is None and time.monotonic() < deadline:
                self._link.receive(time.monotonic())
            self._link.close()

    def _search(self, now: float) -> None:
        sock = self._dialer.poll(now)
        if sock is not None:
            self._link = Link(sock, now)
            self._selector.register(sock, selectors.EVENT_READ, self._hear)
            self._link.send(greeting(self._hello))
        elif now - self._since > self._rules.init_timeout:
            self._give_up()

    def _give_up(self) -> None:
        self._local.log(
            f"{self._me} found no process 0 at {self._coordinator} in "
            f"{self._rules.init_timeout:g} s ({self._dialer.error}): is it running, "
            "and is --coordinator its address?"
        )
        self.code = TERMINATED if self._serial else UNCONNECTED

    def _hear(self) -> None:
        link = self._link
        if link is None:
            return
        now = time.monotonic()
        for message in link.receive(now):
            if self.code is None:
                self._obey(message)
        if link.closed is not None and self.code is None:
            self._part(link.closed, now)

    def _obey(self, message: dict[str, Any]) -> None:
        """Obeys a message of the hub."""
        if "end" in message:
            self._local.kill()
            for line in message["lines"]:
                self._local.log(line)
            self.code = message["end"]
        elif MARK in message:
            self._hub = message["host"]
        elif "say" in message:
            self._local.log(message["say"])
        elif "kill" in message:
            self._local.kill()
        elif "start" in message:
            start = Start(**message["start"])
            self._serial, self._sent = start.serial, []
            self._local.start(start)

    def _part(self, reason: str, now: float) -> None:
        """Searches for the hub again after a lost connection, or ends."""
        assert self._link is not None
        self._selector.unregister(self._link.sock)
        self._link.close()
        self._link = None
        if self._hub is None and reason == GARBAGE:
            self._local.log(
                f"what listens at {self._coordinator} is no process 0 of this program"
            )
            self.code = UNCONNECTED
            return
        self._dialer.error = reason
        # Before the first start the search goes on, in the time that is left.
        if not self._serial:
            self._hub = None
            return
        line = f"process 0's host {self._hub} is gone ({reason})"
        self._local.kill()
        # Process 0's command may come back, started again by hand or by a scheduler.
        if self._rejoined >= self._rules.max_restarts or self._signalled:
            self._local.log(line)
            self.code = TERMINATED
            return
        self._local.log(
            f"{line}: waiting {self._rules.init_timeout:g} s for it to come back"
        )
        self._rejoined += 1
        self._hub, self._since = None, now

    def _report(self, now: float) -> None:
        """Sends changed statuses, and signs of life."""
        statuses = self._local.statuses()
        if self._hub is not None and statuses != self._sent:
            for status in (x for x in statuses if x not in self._sent):
                self._send({"serial": self._serial, "status": status._asdict()})
            self._sent = statuses
        if now - self._beaten >= BEAT:
            self._beaten = now
            self._send({"beat": True})
        if self._link is not None:
            self._link.flush()

    def _send(self, message: dict[str, Any]) -> None:
        if self._link is not None:
            self._link.send(message)
