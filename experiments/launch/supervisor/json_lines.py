"""JSON lines: the messages of processes to their supervisor."""

import json
from typing import Any

PIECE = 1 << 16  # bytes read at once


def encode(message: dict[str, Any]) -> bytes:
    """Encodes a message as a line."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """Decodes a line; returns None if it holds no message."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


class Lines:
    """Cuts a stream of bytes into lines.

    Attributes:
        rest: the beginning of the next line.
    """

    def __init__(self):
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines

    def flush(self) -> bytes:
        """Returns the beginning of the next line, as a line."""
        rest, self.rest = self.rest, b""
        return rest
