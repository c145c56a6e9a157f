"""JSON lines: the messages of processes to their supervisor."""

import json
from typing import Any


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
