"""The status of a process, and the lines that report it to the user."""

import signal
from collections.abc import Sequence
from typing import NamedTuple

# Phases in which jax may replace signal handlers, so that a signal would be lost.
UNREADY = ("start", "connect")


class ProcessStatus(NamedTuple):
    """The state of a process as the supervisor on its host sees it.

    Attributes:
        process: the number of the process.
        pid: process id.
        phase: the last phase that the process reported.
        step: local steps done.
        silent: whether it gives no sign of life.
        halted: whether it is silent because it is stopped, for example by SIGSTOP.
        mute: whether it was killed for its silence.
        code: exit code, real or announced; negative for a signal; None while the
            process runs.
        decided: exit code of its run, announced before the process ends.
        said: kind of its last message: refused, lost or stopped.
        text: its last message.
        gone: why its host counts as lost; "" if it does not.
    """

    process: int
    pid: int
    phase: str = "start"
    step: int | None = None
    silent: bool = False
    halted: bool = False
    mute: bool = False
    code: int | None = None
    decided: int | None = None
    said: str = ""
    text: str = ""
    gone: str = ""


class TrackedProcess(NamedTuple):
    """The state of a process as the leader tracks it; times are time.monotonic().

    Attributes:
        status: the last status of the process.
        host: name of its host; "" if there is only one.
        since: time of its last change of phase or step.
        ended: time at which it was found ended or lost; None while it runs.
    """

    status: ProcessStatus
    host: str
    since: float
    ended: float | None = None

    @property
    def alive(self) -> bool:
        """Whether the process still runs, as far as is known."""
        return self.ended is None

    def updated(self, status: ProcessStatus, now: float) -> "TrackedProcess":
        """Returns the process with a new status."""
        before = self.status
        moved = (status.phase, status.step) != (before.phase, before.step)
        over = status.code is not None or status.mute or status.gone
        return self._replace(
            status=status,
            since=now if moved else self.since,
            ended=now if over and self.ended is None else self.ended,
        )


def ready(statuses: Sequence[ProcessStatus]) -> bool:
    """Whether all processes have started, and the running ones handle signals."""
    return all(x.code is not None or x.phase not in UNREADY for x in statuses)


def place(status: ProcessStatus) -> str:
    """Describes a place: ` at step 96`, ` in "evaluate" at step 96`."""
    step = "" if status.step is None else f" at step {status.step}"
    return step if status.phase == "train" and step else f' in "{status.phase}"{step}'


def end_line(process: TrackedProcess, loss: float) -> str:
    """Reports how a process ended.

    Args:
        process: the process.
        loss: seconds of silence after which a process is killed.
    """
    status, name = process.status, _name(process)
    if status.gone:
        return f"process {status.process}'s host {process.host} is gone ({status.gone})"
    if status.mute:
        why = " (it was stopped)" if status.halted else ""
        return f"{name} gave no sign of life for {loss:g} s{why}{place(status)}"
    if status.said in ("refused", "lost"):
        return f"process {status.process}: {' '.join(status.text.split())}"
    code = status.code or 0
    if code < 0:
        return f"{name} was killed by {signal_name(-code)}{place(status)}"
    return f"{name} ended with exit code {code}{place(status)}"


def signal_name(number: int) -> str:
    """Names a signal; a real-time signal is shown by its number."""
    names = (known.name for known in signal.Signals if known == number)
    return next(names, f"signal {number}")


def silence_line(
    process: TrackedProcess, before: ProcessStatus, seconds: float
) -> str | None:
    """Reports that a process has fallen silent or is back; returns None otherwise."""
    status, name = process.status, _name(process)
    if before.silent == status.silent or not process.alive:
        return None
    if not status.silent:
        return f"{name} gives signs of life again"
    halted = "is stopped: it " if status.halted else ""
    return (
        f"{name} {halted}has given no sign of life for {seconds:g} s; "
        "the others wait for it"
    )


def _name(process: TrackedProcess) -> str:
    """Names a process: process 1 (pid 123 on hostb)."""
    on = f" on {process.host}" if process.host else ""
    return f"process {process.status.process} (pid {process.status.pid}{on})"
