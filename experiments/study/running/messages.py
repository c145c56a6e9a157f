"""Messages to the command of a study from the processes that make its shares."""

import json
from typing import Literal, NamedTuple, get_args


class Ready(NamedTuple):
    """The process has its code, its data and the named devices."""

    devices: str


class Stepped(NamedTuple):
    """Some of a run's local steps are done; the loss is that of the last one."""

    done: int
    steps: int
    loss: float


class Noted(NamedTuple):
    """A warning about the run."""

    text: str


class Made(NamedTuple):
    """The run is complete.

    Attributes:
        words: its results as text.
        files: contents by file name, if the machine does not see the study's folder.
    """

    words: str
    files: dict[str, str] | None = None


class Refused(NamedTuple):
    """The run could not be made.

    Attributes:
        line: the reason, in one line.
        is_request: whether its flags were refused.
        is_full: whether the disk is full, so that all other runs would fail, too.
    """

    line: str
    is_request: bool = False
    is_full: bool = False


class Ended(NamedTuple):
    """The process has ended; another process makes its remaining runs.

    Attributes:
        line: how or why it ended.
        fault: the possible cause: the run that it was making, or the worker, which then
            gets no more runs.
    """

    line: str
    fault: Literal["run", "worker", "nobody"] = "run"


News = Stepped | Noted
"""News about a run in progress."""

Message = Ready | News | Made | Refused | Ended

_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> str:
    """Encodes a message as a line."""
    return json.dumps([type(message).__name__, *message])


def decode(line: str) -> Message:
    """Decodes a line."""
    kind, *fields = json.loads(line)
    return _KINDS[kind](*fields)
