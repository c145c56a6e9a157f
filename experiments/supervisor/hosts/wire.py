"""TCP connections between supervisors, which carry JSON lines."""

import socket
from contextlib import suppress
from typing import Any

from experiments.supervisor.json_lines import PIECE, Lines, decode, encode

LONGEST = 1 << 20  # bytes of a line; what a stranger sends may have no end
GARBAGE = "it speaks another language"


class Link:
    """A TCP connection to another supervisor; never blocks.

    Attributes:
        sock: the connection.
        heard: when something came last, by time.monotonic().
        closed: why nothing comes any more; None while it is open.
    """

    def __init__(self, sock: socket.socket, now: float):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.heard = now
        self.closed: str | None = None
        self._lines = Lines()
        self._out = bytearray()
        self._finished = False

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, now or with a later `flush`."""
        if not self._finished:
            self._out += encode(message)
            self.flush()

    def flush(self) -> None:
        """Sends what could not be sent before."""
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            # Its last words may still be there to be read: receive finds the end.
            self._out.clear()

    def receive(self, now: float) -> list[dict[str, Any]]:
        """The messages that have come; sets `closed` at their end."""
        try:
            data = self.sock.recv(PIECE)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""  # closed, with something unread
        except OSError as error:  # such as: no route any more
            self.closed = error.strerror or "connection lost"
            return []
        self.heard = now
        if not data:
            self.closed = "connection closed"
        messages = []
        for line in self._lines.feed(data):
            message = decode(line)
            if message is None:
                self.closed = GARBAGE
                break
            messages.append(message)
        if len(self._lines.rest) > LONGEST:
            self.closed = GARBAGE
        return messages

    def finish(self) -> None:
        """Says no more. Closed with unread data, its last words would be lost."""
        self.flush()
        self._finished = True
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Gives the connection up."""
        self.sock.close()
