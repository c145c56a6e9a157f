"""Messages from the process that makes a share of a study to the study's command."""

import json
from typing import Literal, NamedTuple, get_args


class Ready(NamedTuple):
    """It has its code, its data and these devices, in words."""

    devices: str


class Stepped(NamedTuple):
    """So many of a run's local steps are done; the loss of the last one."""

    done: int
    steps: int
    loss: float


class Noted(NamedTuple):
    """A caution about the run."""

    text: str


class Made(NamedTuple):
    """The run is made.

    Attributes:
        words: its results.
        files: contents by name, where the study's folder is not to be seen.
    """

    words: str
    files: dict[str, str] | None = None


class Refused(NamedTuple):
    """The run could not be made.

    Attributes:
        line: why.
        is_request: whether its flags were refused.
        is_full: whether the disk is full: all others would fail, too.
    """

    line: str
    is_request: bool = False
    is_full: bool = False


class Ended(NamedTuple):
    """The process has ended; what it has not made is for another one.

    Attributes:
        line: how, or why.
        fault: whose it may be: of the run that it made, or of the worker, which then
            can make none.
    """

    line: str
    fault: Literal["run", "worker", "nobody"] = "run"


News = Stepped | Noted
"""News of a run that is being made."""

Message = Ready | News | Made | Refused | Ended

_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> str:
    """Encodes a message as a line."""
    return json.dumps([type(message).__name__, *message])


def decode(line: str) -> Message:
    """Decodes a line."""
    kind, *fields = json.loads(line)
    return _KINDS[kind](*fields)
