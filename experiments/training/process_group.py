"""The processes of a run, as one of them sees the others.

jax is imported late: the command that starts processes does without it.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.command.stopping import say


class ProcessGroup(NamedTuple):
    """The processes of a run, as this one sees them.

    Methods that exchange numbers are collective: all processes must call them in the
    same order.

    Attributes:
        process: the number of this process. The first writes the run's files.
        processes: the number of processes.
        hosts: the number of machines.
        sharing: the number of processes on this machine.
        note: prints a line for the user, from any process.
        coordinator: HOST:PORT of jax's service in process 0; "" if none was named.
    """

    process: int = 0
    processes: int = 1
    hosts: int = 1
    sharing: int = 1
    note: Callable[[str], None] = say
    coordinator: str = ""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.process == 0

    def gather(self, numbers: Any) -> np.ndarray:
        """Returns every process's whole numbers, below 2³¹: (processes, ...)."""
        if self.processes == 1:
            return np.asarray(numbers)[None]
        from jax.experimental import multihost_utils

        # jax silently truncates wider integers to 32 bits.
        return np.asarray(multihost_utils.process_allgather(np.asarray(numbers)))

    def largest(self, number: int) -> int:
        """Returns the largest value over all processes."""
        return int(self.gather(number).max())

    def smallest(self, number: int) -> int:
        """Returns the smallest value over all processes."""
        return int(self.gather(number).min())

    def agree(self, content: object) -> bool:
        """Returns whether all processes have the same content, of JSON's types."""
        text = json.dumps(content, sort_keys=True).encode()
        # Numbers below 2³¹ for the exchange.
        digest = np.frombuffer(hashlib.sha256(text).digest(), ">u4") >> 1
        return len(np.unique(self.gather(digest.astype(np.int64)), axis=0)) == 1


def on_host(x: Any) -> np.ndarray:
    """Returns a whole array; all processes that hold a part must call this."""
    import jax
    from jax.experimental import multihost_utils

    # One array at a time: a whole model may not fit in one process.
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


ALONE = ProcessGroup()
