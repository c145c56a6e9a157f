"""Last words of the processes of a run, which jax's service keeps for the others."""

import json
import time
from contextlib import suppress
from typing import NamedTuple

from experiments.launch import gloo

PAUSE = 0.25  # seconds between two looks
# Seconds for all to notice who is gone, and to read what process 0's service holds.
LINGERING = 3.0


class Farewell(NamedTuple):
    """Last words of a process.

    Attributes:
        code: the exit code if it refused to go on; 0 if it noticed a loss.
        reason: of the refusal.
    """

    code: int
    reason: str = ""


def leave(process: int, farewell: Farewell) -> None:
    """Leaves last words with process 0's service, unless that is what is gone."""
    with suppress(RuntimeError):
        gloo.store().key_value_set(f"farewell/{process}", json.dumps(farewell))


def read() -> dict[int, Farewell]:
    """Returns the last words so far, by process.

    Raises:
        RuntimeError: process 0 is gone.
    """
    found = gloo.store().key_value_dir_get("farewell/")
    return {int(key.rpartition("/")[2]): Farewell(*json.loads(x)) for key, x in found}


def gathered(count: int) -> dict[int, Farewell]:
    """Waits for the last words of all processes but one, for a while.

    Raises:
        RuntimeError: process 0 is gone.
    """
    deadline, known = time.monotonic() + LINGERING, {}
    while len(known) < count - 1 and time.monotonic() < deadline:
        time.sleep(PAUSE)
        known = read()
    return known
