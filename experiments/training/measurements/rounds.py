"""The rounds of a run: what its workers send, when, and what the center has seen."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

import syncalgos
from experiments.training.plan import Plan
from experiments.training.records import Progress
from syncalgos import Communication, Replica, TrainState
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


def ends_of(
    plan: Plan, replica: Replica, steps: int, sent: Communication | None = None
) -> np.ndarray | None:
    """Returns whether each local step ends a round: something is sent.

    Args:
        plan: of the run.
        replica: one worker's, arrays or their shapes.
        steps: of a run.
        sent: by the run's trainer in so many steps, where that is counted already.

    Returns:
        (steps,) booleans; None if only the run shows it.
    """
    strategy, is_shared = plan.method.strategy, plan.task.kept == "shared"
    # An inner optimizer may look at the loss, which workers that reduce then share.
    reduces = introspection.reduces(strategy)
    shares_loss = reduces and inner_step.asks(
        plan.method.optimizer, replica, np.float32(0)
    )
    # One worker sends nothing, yet its rounds end. Shared tables, and the loss that an
    # optimizer looks at, are sent at every step.
    if is_shared or plan.config.workers == 1 or shares_loss:
        sent, strategy = None, plan.method.algorithm if is_shared else strategy
    if sent is None:
        workers = max(plan.config.workers, 2)
        try:
            sent = syncalgos.communication(
                strategy, replica, workers=workers, steps=steps
            )
        except (ValueError, jax.errors.ConcretizationTypeError):
            return None  # of the latter the engine tells, when it makes the first state
    return np.diff(sent.per_step, prepend=0.0) > 0


def sent_by(plan: Plan, state: TrainState) -> Communication | None:
    """Returns what a run sends; None if only the run shows it."""
    try:
        return plan.trainer.communication(state, plan.config.steps)
    except ValueError:
        return None


def planned(plan: Plan, state: TrainState, ends: np.ndarray | None = None) -> Rounds:
    """Returns the rounds of a run.

    Args:
        plan: of the run.
        state: where the run starts.
        ends: as `ends_of` has them, where they are known already.
    """
    c, replica = plan.config, of_one(state.replica)
    sent = sent_by(plan, state)
    if ends is None:
        ends = ends_of(plan, replica, c.steps, sent)
    rounds = Rounds(
        sent=_count(plan, state, sent),
        is_fixed=sent is not None,
        ends=ends,
        is_followed=bool(c.ema or not introspection.has_center(plan.method.algorithm)),
    )
    if ends is None or ends.any():
        return rounds
    first = _first_sync(plan, replica)
    out = [f"--steps {first} or more"] if first else []
    if "period" in c.arguments:
        out.append(f"--period {c.steps} or less")
    when = f"first syncs after step {first}, beyond" if first else "does not sync in"
    use = f": use {', or '.join(out)}" if out else ""
    return rounds._replace(unsynced=f"{c.algo} {when} these {c.steps} steps{use}")


def _count(plan: Plan, state: TrainState, sent: Communication | None) -> Count:
    """Returns the count of what is sent, by decisions of the data so far."""
    decisions = len(found(state.sync))
    if sent is not None or not decisions:
        return lambda progress: sent
    of_taken = plan.trainer.counter(state, plan.config.steps)
    taken = np.zeros((plan.config.steps, decisions), bool)

    def count_taken(progress):
        now = taken.copy()  # later steps count as without a sync
        if progress.decided:
            now[tuple(np.transpose(progress.decided))] = True
        try:
            return of_taken(now)
        except ValueError:  # it depends on more than those decisions
            return None

    return count_taken


def _first_sync(plan: Plan, replica: Replica) -> int | None:
    """Returns the steps after which the first round ends; None if it is far away."""
    steps = plan.config.steps
    while steps < FARTHEST:
        steps = min(2 * steps, FARTHEST)
        ends = ends_of(plan, replica, steps)
        if ends is None:
            return None
        if ends.any():
            return int(np.argmax(ends)) + 1
    return None
