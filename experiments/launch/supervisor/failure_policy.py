"""Pure functions that decide from all processes' states whether a run continues."""

import signal
from collections.abc import Sequence
from typing import Literal, NamedTuple

from experiments import exit_codes
from experiments.exit_codes import INTERRUPTED, SIGNALS, TERMINATED, stopped_by
from experiments.launch.supervisor.group import processes
from experiments.launch.supervisor.limits import Limits
from experiments.launch.supervisor.process_status import TrackedProcess, end_line, place

# Seconds to wait for the cause to appear, or for others to end in the same way: the
# processes that notice a loss often end before the supervisor sees the lost one.
GRACE = 1.0

Outcome = Literal["done", "stopped", "failed", "lost", "suspect"]


class Decision(NamedTuple):
    """The next action.

    Attributes:
        kind: "end": the run ends; "lost": a process is lost; "unconnected": jax's own
            start-up failed.
        code: the exit code if there is no further attempt.
        lines: lines to show to the user.
    """

    kind: Literal["end", "lost", "unconnected"]
    code: int
    lines: list[str]


def decide(
    group: Sequence[TrackedProcess], asked: int | None, now: float, limits: Limits
) -> Decision | None:
    """Decides whether a run continues.

    Args:
        group: all processes of the run.
        asked: the signal that was passed on to the processes; None if there was none.
        now: time.monotonic().
        limits: how long a process may be silent.

    Returns:
        The next action; None while the run continues.
    """
    stopping = asked is not None or any(p.status.said == "stopped" for p in group)
    ended = sorted((p for p in group if not p.alive), key=lambda p: p.ended or 0.0)

    def having(outcome: Outcome) -> list[TrackedProcess]:
        return [p for p in ended if _outcome(p, stopping) == outcome]

    lost, failed, stopped = having("lost"), having("failed"), having("stopped")
    # Who notices the end of another may end before it, but does not know the reason.
    suspects = sorted(having("suspect"), key=lambda p: p.status.said == "lost")
    is_over = len(ended) == len(group)
    # A lost process can cause an exception in another one, but never a refusal.
    if lost and all(p.status.code == exit_codes.FAILED for p in failed):
        return _loss([end_line(lost[0], limits.lost_after)], stopping, asked)
    first = (failed or suspects or [None])[0]
    # Another process may be the cause; its end may be noticed a moment later.
    if first and not is_over and now - (first.ended or 0.0) < GRACE:
        return None
    if failed:
        return _failure(failed, len(group), limits)
    if suspects:
        lines = [end_line(suspects[0], limits.lost_after)]
        if any(p.status.phase == "connect" for p in suspects) and not stopping:
            return Decision("unconnected", exit_codes.UNCONNECTED, lines)
        return _loss(lines, stopping, asked)
    if not is_over:
        return None
    codes = [p.status.code or 0 for p in stopped or ended]
    code = codes[0] if stopped else max(codes)
    return Decision("end", code if code >= 0 else stopped_by(-code), [])


def _outcome(process: TrackedProcess, stopping: bool) -> Outcome:
    """Classifies how a process ended; "suspect": another one may be the cause."""
    status, code = process.status, process.status.code or 0
    if status.gone or status.mute:
        return "lost"
    if code in (exit_codes.DONE, exit_codes.DIVERGED):
        return "done"
    if status.said == "lost":
        return "suspect"
    if stopping and (code in (TERMINATED, INTERRUPTED) or -code in SIGNALS):
        return "stopped"
    if code > 0:
        return "suspect" if code == TERMINATED else "failed"
    # jax aborts in C++ when another process is gone.
    crashes = [signal.SIGABRT]
    if status.phase == "connect":
        # jax's start-up crashes with these signals when its port is taken.
        crashes += [signal.SIGSEGV, signal.SIGBUS]
    return "suspect" if -code in crashes else "lost"


def _loss(lines: list[str], stopping: bool, asked: int | None) -> Decision:
    """Decides after a loss; a run that is being stopped ends without a restart."""
    if not stopping:
        return Decision("lost", TERMINATED, lines)
    return Decision("end", stopped_by(asked or signal.SIGTERM), lines)


def _failure(failed: list[TrackedProcess], count: int, limits: Limits) -> Decision:
    """Ends a run in which a process refused to continue or raised an exception."""
    first = failed[0].status
    refusals: dict[str, list[int]] = {}
    for status in (p.status for p in failed if p.status.said == "refused"):
        text = " ".join(status.text.split())
        refusals.setdefault(text, []).append(status.process)
    lines = [
        text if len(ids) == count else f"{processes(ids)}: {text}"
        for text, ids in refusals.items()
    ]
    if first.said != "refused":
        lines.append(end_line(failed[0], limits.lost_after))
    return Decision("end", first.code or 0, lines)


def connect_timeout_line(
    group: Sequence[TrackedProcess], now: float, seconds: float
) -> str | None:
    """Reports that jax's own start-up takes too long; returns None otherwise.

    Args:
        group: all processes.
        now: time.monotonic().
        seconds: the limit in seconds.
    """
    alive = [p for p in group if p.alive]
    waiting = [p for p in alive if p.status.phase == "connect"]
    if not any(now - p.since >= seconds for p in waiting):
        return None
    ids = processes([p.status.process for p in waiting])
    missing = [p.status.process for p in alive if p.status.phase == "start"]
    if missing:
        return f"{ids} waited {seconds:g} s for {processes(missing)} to start jax"
    return f"{ids} could not connect in {seconds:g} s: a firewall may block the port"


def stuck_lines(
    group: Sequence[TrackedProcess], now: float, seconds: float
) -> dict[tuple[int, str, int | None], str]:
    """Reports which process keeps the others waiting.

    Args:
        group: all processes.
        now: time.monotonic().
        seconds: how long each process must have stayed at its phase and step.

    Returns:
        Lines by process, phase and step, so that each is shown once.
    """
    still = [p for p in group if p.alive and now - p.since >= seconds]
    steps = [p.status.step or 0 for p in still if p.status.phase == "train"]
    first = max(steps, default=-1)
    return {
        (status.process, status.phase, status.step): (
            f"process {status.process} has been{place(status)} for {seconds:g} s; "
            f"the others wait for it in step {first}"
        )
        for status in (p.status for p in still)
        if (status.step or 0) < first + (status.phase != "train")
    }
