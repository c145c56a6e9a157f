"""The connections of the other commands to the hub."""

import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.exit_codes import UNCONNECTED
from experiments.supervisor.hosts.rendezvous import (
    MARK,
    VERSION,
    Hello,
    objection,
    parse,
)
from experiments.supervisor.hosts.wire import Link

STRANGER = 5.0  # seconds for a new connection to introduce itself
BEAT = 1.0  # seconds between signs of life


class Heard(NamedTuple):
    """A message of a guest.

    Attributes:
        ids: of its processes.
        message: as sent; {"gone": reason} when the guest is lost, {"objection": line}
            when it is refused.
    """

    ids: list[int]
    message: dict[str, Any]


@dataclass(eq=False)
class Guest:
    """A connection: another command, or a stranger."""

    link: Link
    since: float  # time of its arrival or dismissal
    hello: Hello | None = None
    dismissed: bool = False

    @property
    def present(self) -> bool:
        """Whether it takes part."""
        return self.hello is not None and not self.dismissed


class Guests:
    """All connections; strangers cannot disturb the run.

    Attributes:
        late: whether the run began, so that an objection ends the newcomer alone.
    """

    def __init__(
        self,
        host: Hello,
        loss: float,
        selector: selectors.BaseSelector,
        listener: socket.socket,
    ):
        """Starts to listen.

        Args:
            host: the hub's own hello.
            loss: seconds of silence after which a guest counts as gone.
            selector: of the event loop; its data are functions to call.
            listener: socket on which they arrive.
        """
        self.late = False
        self._host = host
        self._loss = loss
        self._selector = selector
        self._listener = listener
        self._all: list[Guest] = []
        self._heard: list[Heard] = []
        self._beaten = time.monotonic()
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def hellos(self) -> list[Hello]:
        """The hellos of those that take part."""
        return [g.hello for g in self._all if g.hello and not g.dismissed]

    def heard(self) -> list[Heard]:
        """The messages since the last call."""
        heard, self._heard = self._heard, []
        return heard

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message to those that take part."""
        for guest in self._all:
            if guest.present:
                guest.link.send(message)

    def tend(self, now: float) -> None:
        """Sends waiting messages, and drops silent connections."""
        beat = now - self._beaten >= BEAT
        if beat:
            self._beaten = now
            self.send({"beat": True})
        for guest in list(self._all):
            if guest.present and now - guest.link.heard > self._loss:
                self._drop(guest, f"silent for {self._loss:g} s")
            elif not guest.present and now - guest.since > STRANGER:
                self._drop(guest, "not let in")
            else:
                guest.link.flush()

    def dismiss(self, code: int, lines: list[str]) -> None:
        """Dismisses all that take part, with an exit code and lines to print."""
        for guest in self._all:
            if guest.present:
                self._dismiss(guest, code, lines)

    @property
    def leaving(self) -> bool:
        """Whether some that were dismissed are still connected."""
        return any(guest.dismissed for guest in self._all)

    def close(self) -> None:
        """Closes all connections."""
        self._listener.close()
        for guest in self._all:
            guest.link.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        # It has left again.
        except OSError:
            return
        now = time.monotonic()
        guest = Guest(Link(sock, now), now)
        self._all.append(guest)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(guest))

    def _hear(self, guest: Guest) -> None:
        for message in guest.link.receive(time.monotonic()):
            if guest.hello is None:
                self._greet(guest, message)
            elif not guest.dismissed:
                self._heard.append(Heard(guest.hello.ids, message))
        # The connection stays open for the whole run: a closed one is a lost host.
        if guest.link.closed is not None:
            self._drop(guest, guest.link.closed)

    def _greet(self, guest: Guest, message: dict[str, Any]) -> None:
        """Admits a command, or reports why not."""
        hello = parse(message)
        if hello is None:
            return  # a stranger, whom `tend` drops soon
        line = objection(message, hello, self._host, [self._host, *self.hellos()])
        guest.hello = hello
        if line is None:
            guest.link.send({MARK: VERSION, "host": self._host.host[0]})
        elif self.late:
            self._dismiss(guest, UNCONNECTED, [line])
        else:
            self._heard.append(Heard(hello.ids, {"objection": line}))

    def _dismiss(self, guest: Guest, code: int, lines: list[str]) -> None:
        guest.link.send({"end": code, "lines": lines})
        guest.link.finish()
        guest.dismissed = True
        guest.since = time.monotonic()

    def _drop(self, guest: Guest, reason: str) -> None:
        if guest not in self._all:
            return
        self._all.remove(guest)
        self._selector.unregister(guest.link.sock)
        guest.link.close()
        if guest.hello is not None and not guest.dismissed:
            self._heard.append(Heard(guest.hello.ids, {"gone": reason}))
