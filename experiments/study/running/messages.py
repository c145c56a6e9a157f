"""What is told of a study's runs: news of one under way, and how it ended."""

from typing import NamedTuple


class Stepped(NamedTuple):
    """Some of a run's local steps are done; the loss is that of the last one."""

    done: int
    steps: int
    loss: float


class Noted(NamedTuple):
    """A warning about the run."""

    text: str


class Made(NamedTuple):
    """The run is complete; the words are its results."""

    words: str


class Refused(NamedTuple):
    """The run could not be made.

    Attributes:
        line: the reason, in one line.
        is_request: whether its flags were refused.
    """

    line: str
    is_request: bool = False


News = Stepped | Noted
"""News about a run in progress."""
