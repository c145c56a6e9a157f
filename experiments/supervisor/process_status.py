"""What is seen of a process, and how it is told to the user."""

import signal
from typing import NamedTuple


class Seen(NamedTuple):
    """A process as the supervisor on its host sees it.

    Attributes:
        process: its number.
        pid: of the process.
        phase: where it is, as it told.
        step: the local steps it had done.
        silent: it gives no sign of life.
        halted: it is silent because it is stopped, as by SIGSTOP.
        mute: it was silent for so long that it was killed.
        code: how it ended, or told that it will, negative for a signal; None while it
            goes on.
        said: its last words' kind: refused, lost or stopped.
        text: its last words.
    """

    process: int
    pid: int
    phase: str = "start"
    step: int | None = None
    silent: bool = False
    halted: bool = False
    mute: bool = False
    code: int | None = None
    said: str = ""
    text: str = ""


class Known(NamedTuple):
    """A process as the hub knows it; times by time.monotonic().

    Attributes:
        seen: what its supervisor saw last.
        host: its name; None where there is but one.
        since: when its phase or step changed last.
        ended: when it was found ended or lost.
        gone: why its supervisor is not heard any more.
    """

    seen: Seen
    host: str | None
    since: float
    ended: float | None = None
    gone: str | None = None

    @property
    def alive(self) -> bool:
        """Whether it goes on, as far as the hub knows."""
        return self.ended is None

    def update(self, seen: Seen, now: float) -> "Known":
        """The same process after a report."""
        before = self.seen
        moved = (seen.phase, seen.step) != (before.phase, before.step)
        over = seen.code is not None or seen.mute
        return self._replace(
            seen=seen,
            since=now if moved else self.since,
            ended=now if over and self.ended is None else self.ended,
        )


def name(known: Known) -> str:
    """Process 1 (pid 123 on hostb)."""
    on = "" if known.host is None else f" on {known.host}"
    return f"process {known.seen.process} (pid {known.seen.pid}{on})"


def place(seen: Seen) -> str:
    """Where it is: ` at step 96`, ` in "evaluate" at step 96`."""
    step = "" if seen.step is None else f" at step {seen.step}"
    return step if seen.phase == "train" and step else f' in "{seen.phase}"{step}'


def end(known: Known, loss: float) -> str:
    """How a process ended.

    Args:
        known: the process.
        loss: seconds of silence after which it was given up.
    """
    seen = known.seen
    if known.gone is not None:
        return f"process {seen.process}'s host {known.host} is gone ({known.gone})"
    if seen.mute:
        why = " (it was stopped)" if seen.halted else ""
        return f"{name(known)} gave no sign of life for {loss:g} s{why}{place(seen)}"
    if seen.said in ("refused", "lost"):
        return f"process {seen.process}: {' '.join(seen.text.split())}"
    code = seen.code or 0
    if code < 0:
        return f"{name(known)} was killed by {_signal(-code)}{place(seen)}"
    return f"{name(known)} ended with exit code {code}{place(seen)}"


def silence(known: Known, before: Seen, seconds: float) -> str | None:
    """A line when a process falls silent, and one when it is back."""
    seen = known.seen
    if before.silent == seen.silent or not known.alive:
        return None
    if not seen.silent:
        return f"{name(known)} gives signs of life again"
    halted = "is stopped: it " if seen.halted else ""
    return (
        f"{name(known)} {halted}has given no sign of life for {seconds:g} s; "
        "the others wait for it"
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one has no name
        return f"signal {number}"
