"""The rounds of a run: what its workers send, when, and what the center has seen."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import syncalgos
from experiments.training.components import Components
from experiments.training.records import Progress
from syncalgos import Communication, Strategy, TrainState
from syncalgos.combinators import introspection
from syncalgos.combinators.decided import found
from syncalgos.engine import inner_step
from syncalgos.engine.state import of_one

FARTHEST = 2**12  # steps within which the first sync is looked for

Count = Callable[[Progress], Communication | None]
"""Progress -> the communication of each worker; None if not even a run shows it."""


class Rounds(NamedTuple):
    """The rounds of a run, as far as they are known before it trains.

    Attributes:
        sent: counts what each worker sends in the whole run.
        is_fixed: whether that follows from the step alone.
        ends: whether a round ends with a step, (steps,); None if only the run shows.
        is_followed: whether the evaluated model changes at every step.
        unsynced: why no sync comes, and the way out; "" if one does.
    """

    sent: Count
    is_fixed: bool
    ends: np.ndarray | None
    is_followed: bool
    unsynced: str = ""

    @property
    def untrained(self) -> str:
        """Why the evaluated model never changes, and the way out; "" if it does."""
        return "" if self.is_followed else self.unsynced

    def center_step(self, steps: int) -> int:
        """Returns the last local step that is in the center after so many."""
        if self.is_followed or self.ends is None:
            return steps
        found = np.flatnonzero(self.ends[:steps])
        return int(found[-1]) + 1 if len(found) else 0


def planned(parts: Components, state: TrainState) -> Rounds:
    """Returns the rounds of a run that starts from a state."""
    c = parts.config
    sent = _communication(parts, state, c.steps)
    rounds = Rounds(
        sent=_count(parts, state, sent),
        is_fixed=sent is not None,
        ends=_ends(parts, state, c.steps, sent),
        is_followed=bool(c.ema or not introspection.has_center(parts.algorithm)),
    )
    if rounds.ends is None or rounds.ends.any():
        return rounds
    first = _first_sync(parts, state)
    out = [f"--steps {first} or more"] if first else []
    if "period" in c.arguments:
        out.append(f"--period {c.steps} or less")
    when = f"first syncs after step {first}, beyond" if first else "does not sync in"
    use = f": use {', or '.join(out)}" if out else ""
    return rounds._replace(unsynced=f"{c.algo} {when} these {c.steps} steps{use}")


def _communication(
    parts: Components,
    state: TrainState,
    steps: int,
    workers: int | None = None,
    strategy: Strategy | None = None,
) -> Communication | None:
    """Counts what each worker sends; None if only the run shows it.

    Args:
        parts: of the run.
        state: where it starts.
        steps: of a run.
        workers: as if there were so many; None means those that there are.
        strategy: as if it were this one; None means the run's.
    """
    try:
        if strategy is None:
            return parts.trainer.communication(state, steps, workers)
        replica = of_one(state.replica)
        return syncalgos.communication(strategy, replica, workers or 1, steps)
    except ValueError:
        return None


def _count(parts: Components, state: TrainState, sent: Communication | None) -> Count:
    """Returns the count of what is sent, by decisions of the data so far."""
    if sent is not None or not introspection.decides(parts.strategy):
        return lambda progress: sent
    of_taken = parts.trainer.counter(state, parts.config.steps)
    taken = np.zeros((parts.config.steps, len(found(state.sync))), bool)

    def count_taken(progress):
        now = taken.copy()  # later steps count as without a sync
        if progress.decided:
            now[tuple(np.transpose(progress.decided))] = True
        try:
            return of_taken(now)
        except ValueError:  # it depends on more than those decisions
            return None

    return count_taken


def _ends(
    parts: Components, state: TrainState, steps: int, sent: Communication | None
) -> np.ndarray | None:
    """Returns whether each local step ends a round: something is sent, or would be."""
    # One worker sends nothing, yet its rounds end.
    workers = max(parts.config.workers, 2)
    if parts.task.kept == "shared":  # tables are sent at every step
        sent = _communication(parts, state, steps, workers, parts.algorithm)
    elif _shares_loss(parts, state):  # that is sent at every step, too
        sent = _communication(parts, state, steps, workers, parts.strategy)
    elif workers != parts.config.workers:
        sent = _communication(parts, state, steps, workers)
    return None if sent is None else np.diff(sent.per_step, prepend=0.0) > 0


def _shares_loss(parts: Components, state: TrainState) -> bool:
    """Whether workers share their loss, for an inner optimizer that looks at it."""
    if not introspection.reduces(parts.strategy):
        return False
    return inner_step.asks(parts.optimizer, of_one(state.replica), np.float32(0))


def _first_sync(parts: Components, state: TrainState) -> int | None:
    """Returns the steps after which the first round ends; None if it is far away."""
    steps = parts.config.steps
    while steps < FARTHEST:
        steps = min(2 * steps, FARTHEST)
        ends = _ends(parts, state, steps, _communication(parts, state, steps))
        if ends is None:
            return None
        if ends.any():
            return int(np.argmax(ends)) + 1
    return None
