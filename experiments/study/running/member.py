"""Makes a share of a study on a Dask worker, in a process that the worker watches.

This module does not import jax, because a worker outlives many studies.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.launch.cluster.member import is_wanted
from experiments.launch.supervisor.child import Child, Remote
from experiments.launch.supervisor.limits import Limits
from experiments.launch.supervisor.process_status import signal_name
from experiments.study.running import messages
from experiments.study.running.messages import Ended, Made, Message, Noted

TICK = 0.05  # seconds between two polls
STUCK = 600.0  # seconds without a step before the user is told
LIMITS = Limits()


class Order(NamedTuple):
    """The order to make a share of a study.

    Attributes:
        study: random name of the command, which is the topic of messages to it.
        directory: base of relative paths in flags, if it exists on this machine.
        environment: environment variables of the process: devices, threads, XLA flags.
        settings: settings of jax.
        own: digests of the user's own modules, by name.
        first: flags of one run of the study, whose data every process must load.
        runs: flags of experiments.run and the folder of each run, in order.
        sends: whether to send the runs' files, because this machine does not see the
            study's folder.
    """

    study: str
    directory: str
    environment: Mapping[str, str]
    settings: Mapping[str, Any]
    own: Mapping[str, str]
    first: Sequence[str]
    runs: Sequence[tuple[Sequence[str], str]] = ()
    sends: bool = False


def make_share(order: Order) -> None:
    """Makes the runs of a share, and reports by messages; the last one is `Ended`."""
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def report(message: Message) -> None:
        event = {"key": key, "message": messages.encode(message)}
        worker.log_event(order.study, event)

    with tempfile.TemporaryDirectory() as spare:
        report(watched(order, Path(spare), report, lambda: is_wanted(worker, key)))


def watched(
    order: Order,
    spare: Path,
    report: Callable[[Message], None],
    is_wanted: Callable[[], bool],
) -> Ended:
    """Starts the process of a share, and watches it until it ends.

    Args:
        order: the share.
        spare: an empty folder.
        report: function that is called with each message.
        is_wanted: function that says whether the study's command still wants the share.
    """
    last_words, moved = "", time.monotonic()

    def hear(line: str) -> None:
        nonlocal last_words
        last_words = line.strip() or last_words

    def take(line: str) -> None:
        nonlocal moved
        moved, message = time.monotonic(), messages.decode(line)
        if isinstance(message, Made) and order.sends:
            message = message._replace(files=_taken(spare))
        report(message)

    if order.sends:
        placed = [(x, str(spare / Path(folder).name)) for x, folder in order.runs]
        order = order._replace(runs=placed)
    here = order.directory if Path(order.directory).is_dir() else "."
    child = Child(
        # -P: the process finds the same user modules as the worker.
        [sys.executable, "-P", "-m", "experiments.study.running.child"],
        {"process": 0, "announced": order._asdict()},
        hear,
        Remote(here, take, None),
    )
    pid = f"its process (pid {child.status.pid})"
    try:
        while not child.is_over and not child.status.mute:
            if not is_wanted():
                return Ended("its worker has given it up", "nobody")
            child.poll(time.monotonic(), LIMITS)
            # A dead mount or a deadlock may be the cause, or a long compilation.
            if time.monotonic() - moved > STUCK:
                moved = math.inf
                report(Noted(f"{pid} lives, but has taken no step for {STUCK:g} s"))
            time.sleep(TICK)
    finally:
        child.kill()
        child.reap()
    if child.status.mute:
        why = " (it was stopped)" if child.status.halted else ""
        return Ended(f"{pid} gave no sign of life for {LIMITS.lost_after:g} s{why}")
    code = child.status.code or 0
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with {code}"
    return Ended(f"its process {how}{': ' if last_words else ''}{last_words}")


def _taken(spare: Path) -> dict[str, str]:
    """Reads and removes the files of the only run in a folder."""
    files = {}
    for path in spare.glob("seed-*/*"):
        files[path.name] = path.read_text("utf-8")
        path.unlink()
    return files
