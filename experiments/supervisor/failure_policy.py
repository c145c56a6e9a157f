"""What is made of the processes' state: pure functions of what is known."""

import signal
from collections.abc import Sequence
from typing import Literal, NamedTuple

from experiments.cli.exits import (
    DIVERGED,
    DONE,
    FAILED,
    INTERRUPTED,
    TERMINATED,
    UNCONNECTED,
    stopped_by,
)
from experiments.supervisor.group import Rules, processes
from experiments.supervisor.process_status import Known, end, place

GRACE = 1.0  # seconds for who is to blame to be found, or for others to end alike

Fate = Literal["alive", "done", "stopped", "failed", "lost", "suspect"]


class Verdict(NamedTuple):
    """What is to be done.

    Attributes:
        kind: the run ends; a process is lost; jax's own start-up has failed.
        code: the exit code, unless there is another attempt.
        lines: what the user is told.
    """

    kind: Literal["end", "lost", "unconnected"]
    code: int
    lines: list[str]


def verdict(
    members: Sequence[Known], asked: int | None, now: float, rules: Rules
) -> Verdict | None:
    """Judges a run.

    Args:
        members: all its processes.
        asked: the signal that was passed on to some of them.
        now: time.monotonic().
        rules: how long silence may last.

    Returns:
        None while it shall go on.
    """
    stopping = asked is not None or any(m.seen.said == "stopped" for m in members)
    fates: list[tuple[Fate, Known]] = [(_fate(m, stopping), m) for m in members]
    ended = sorted(
        (m.ended, i) for i, (_, m) in enumerate(fates) if m.ended is not None
    )
    order = [fates[i] for _, i in ended]
    going = len(order) < len(members)
    lost = [m for fate, m in order if fate == "lost"]
    failed = [m for fate, m in order if fate == "failed"]
    # An exception may be what a lost process has brought about; a refusal is not.
    if lost and all(m.seen.code == FAILED for m in failed):
        return _lost([end(lost[0], rules.loss)], stopping, asked)
    if failed:
        over = not going or now - (failed[0].ended or 0.0) >= GRACE
        return _failure(failed, len(members), rules) if over else None
    suspects = [m for fate, m in order if fate == "suspect"]
    if suspects:
        # Others' end may have brought theirs about, and be known a moment later.
        if going and now - (suspects[0].ended or 0.0) < GRACE:
            return None
        lines = [end(suspects[0], rules.loss)]
        if any(m.seen.phase == "connect" for m in suspects) and not stopping:
            return Verdict("unconnected", UNCONNECTED, lines)
        return _lost(lines, stopping, asked)
    if going:
        return None
    stops = [m.seen.code or 0 for fate, m in order if fate == "stopped"]
    if stops:
        code = stops[0] if stops[0] > 0 else stopped_by(-stops[0])
        return Verdict("end", code, [])
    return Verdict("end", max((m.seen.code or 0) for m in members), [])


def _fate(known: Known, stopping: bool) -> Fate:
    seen = known.seen
    if known.alive:
        return "alive"
    if known.gone is not None or seen.mute:
        return "lost"
    code = seen.code or 0
    if code in (DONE, DIVERGED):
        return "done"
    if seen.said == "lost":
        return "suspect"
    if stopping and code in (TERMINATED, INTERRUPTED, -signal.SIGTERM, -signal.SIGINT):
        return "stopped"
    if code > 0:
        return "suspect" if code == TERMINATED else "failed"
    crashes = [signal.SIGABRT]  # jax aborts where another one is gone
    if seen.phase == "connect":
        crashes += [signal.SIGSEGV, signal.SIGBUS]  # or its port is taken
    return "suspect" if -code in crashes else "lost"


def _lost(lines: list[str], stopping: bool, asked: int | None) -> Verdict:
    """A loss, which ends the run where it was to end anyway."""
    if not stopping:
        return Verdict("lost", TERMINATED, lines)
    return Verdict("end", stopped_by(asked or signal.SIGTERM), lines)


def _failure(failed: list[Known], count: int, rules: Rules) -> Verdict:
    """The end of a run of which a process refused to go on, or raised."""
    first = failed[0]
    said: dict[str, list[int]] = {}
    for known in failed:
        if known.seen.said == "refused":
            text = " ".join(known.seen.text.split())
            said.setdefault(text, []).append(known.seen.process)
    lines = [
        text if len(ids) == count else f"{processes(ids)}: {text}"
        for text, ids in said.items()
    ]
    if first.seen.said != "refused":
        lines.append(end(first, rules.loss))
    return Verdict("end", first.seen.code or 0, lines)


def unconnected(members: Sequence[Known], now: float, seconds: float) -> str | None:
    """Tells that jax's own start-up takes too long.

    Args:
        members: all processes.
        now: time.monotonic().
        seconds: how long it may take.
    """
    alive = [m for m in members if m.alive]
    waiting = [m for m in alive if m.seen.phase == "connect"]
    if not any(now - m.since >= seconds for m in waiting):
        return None
    ids = processes([m.seen.process for m in waiting])
    missing = [m.seen.process for m in alive if m.seen.phase == "start"]
    if missing:
        return f"{ids} waited {seconds:g} s for {processes(missing)} to start jax"
    return f"{ids} could not connect in {seconds:g} s: is a firewall between the hosts?"


def stuck(
    members: Sequence[Known], now: float, seconds: float
) -> dict[tuple[int, str, int | None], str]:
    """Finds the processes for which others wait.

    Args:
        members: all processes.
        now: time.monotonic().
        seconds: how long both must have been where they are.

    Returns:
        Lines for the user, by process, phase and step.
    """
    still = [m for m in members if m.alive and now - m.since >= seconds]
    steps = [m.seen.step or 0 for m in still if m.seen.phase == "train"]
    first = max(steps, default=-1)
    return {
        (seen.process, seen.phase, seen.step): (
            f"process {seen.process} has been{place(seen)} for {seconds:g} s; "
            f"the others wait for it in step {first}"
        )
        for seen in (m.seen for m in still)
        if (seen.step or 0) < first + (seen.phase != "train")
    }
