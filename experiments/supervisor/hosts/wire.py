"""TCP connections between supervisors, which carry JSON lines."""

import socket
from contextlib import suppress
from typing import Any

from experiments.supervisor.json_lines import PIECE, Lines, decode, encode

LONGEST = 1 << 20  # bytes of a line; a stranger's may have no end
GARBAGE = "it speaks another language"


class Link:
    """A TCP connection to another supervisor; never blocks.

    Attributes:
        sock: the connection.
        heard: time of the last message, by time.monotonic().
        closed: why the connection ended; None while it is open.
    """

    def __init__(self, sock: socket.socket, now: float):
        sock.setblocking(False)
        # Messages are short: they must not wait for more to fill a packet.
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
        """Sends waiting messages."""
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            # Its last messages may still be there to be read: receive finds the end.
            self._out.clear()

    def receive(self, now: float) -> list[dict[str, Any]]:
        """Returns new messages; sets `closed` at their end."""
        try:
            data = self.sock.recv(PIECE)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            # The other side closed with something unread.
            data = b""
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
        """Shuts down the sending side."""
        # A close with unread data would reset the connection, and the last messages be
        # lost: the other side closes first.
        self.flush()
        self._finished = True
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection."""
        self.sock.close()
