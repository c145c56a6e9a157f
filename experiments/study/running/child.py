"""The process that makes a share: python -m experiments.study.running.child.

`member.py` starts it, so that devices and threads are set before jax starts, and a
crash ends only this process.
"""

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.cli.errors import BadRequest
from experiments.launch.supervisor.child_side import join_supervisor
from experiments.study.running.member import Order
from experiments.study.running.messages import Ended, Message, Noted, Ready, encode
from experiments.training.config import parse

if TYPE_CHECKING:
    from experiments.study.grid import Loader

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

Write = Callable[[Message], None]


class Notes(io.TextIOBase):
    """A stream that replaces stderr: text that Python prints there is a warning."""

    def __init__(self, write: Write):
        self._write = write

    def write(self, text: str) -> int:
        """Reports each line that is not blank."""
        for line in filter(None, map(str.strip, text.splitlines())):
            self._write(Noted(line))
        return len(text)


def main() -> None:
    """Makes the runs of the share that the supervisor has announced."""
    side = join_supervisor()
    assert side is not None
    # Output of libraries goes to stderr.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def write(message: Message) -> None:
        out.write(encode(message).encode() + b"\n")
        out.flush()

    sys.stderr = Notes(write)
    order = Order(**side.announced)
    os.environ.update(order.environment)
    _make(order, write)
    side.leave(0)


def _make(order: Order, write: Write) -> None:
    """Makes the runs of a share."""
    from experiments.study.grid import Loader  # imports jax
    from experiments.study.running.maker import Maker, described

    loader = Loader()
    try:
        write(_ready(order, loader))
    except Exception as error:
        return write(Ended(described(error).line, "worker"))
    maker = Maker(loader)
    for argv, folder in order.runs:
        try:
            # Only the end of this process stops a run.
            outcome = maker.make(parse(argv), Path(folder), write, lambda: 0)
        except OSError as error:
            outcome = described(error)._replace(is_full=error.errno in FULL)
        write(outcome)


def _ready(order: Order, loader: "Loader") -> Ready:
    """Applies jax's settings, checks the user's modules, and loads the study's data."""
    import jax

    from experiments.study.running import versions

    for name, value in order.settings.items():
        jax.config.update(name, value)
    for name, digest in versions.of_modules(f"{name}:" for name in order.own).items():
        if digest != order.own[name]:
            raise BadRequest(f"its copy of {name} differs from the command's")
    devices = loader.plan(parse(order.first))[0].trainer.layout.devices
    return Ready(f"{len(devices)} {devices[0].platform}")


if __name__ == "__main__":
    main()
