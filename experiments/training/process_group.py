"""The processes of a run, seen from one of them, and what they agree on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import multihost_utils

from experiments.cli import terminal


def _nothing(phase: str, step: int | None = None) -> None:
    """Nobody watches a process that is alone."""


class ProcessGroup(NamedTuple):
    """The processes of a run, seen from this one.

    Every method that asks the others must be called by all, in the same order.

    Attributes:
        process: the number of this one. The first writes the run's files.
        processes: how many there are.
        hosts: on how many machines they are.
        sharing: how many of them share this machine.
        announce: (phase, step), for the process that watches this one.
        note: a line for the user, from any process.
    """

    process: int = 0
    processes: int = 1
    hosts: int = 1
    sharing: int = 1
    announce: Callable[[str, int | None], None] = _nothing
    note: Callable[[str], None] = terminal.say

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.process == 0

    def gather(self, numbers: Any) -> np.ndarray:
        """Every process's whole numbers, below 2³¹: (processes, ...)."""
        if self.processes == 1:
            return np.asarray(numbers)[None]
        return np.asarray(multihost_utils.process_allgather(np.asarray(numbers)))

    def largest(self, number: int) -> int:
        """The largest value over all processes."""
        return int(self.gather(number).max())

    def smallest(self, number: int) -> int:
        """The smallest value over all processes."""
        return int(self.gather(number).min())

    def part(self, rows: np.ndarray) -> np.ndarray:
        """This process's contiguous part of each global batch, (steps, batch)."""
        return np.split(rows, self.processes, axis=1)[self.process]


ALONE = ProcessGroup()
