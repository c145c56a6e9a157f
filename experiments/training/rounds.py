"""The ends of a run's rounds, and the steps that the evaluated model has seen."""

from collections.abc import Callable

import numpy as np

import syncalgos
from experiments.training.progress import Progress
from experiments.training.setup import Plan
from syncalgos import Communication, Strategy, TrainState
from syncalgos.combinators import introspection
from syncalgos.combinators.decided import found
from syncalgos.engine import inner_step
from syncalgos.engine.state import of_one

FARTHEST = 2**12  # steps within which the first sync is looked for

Count = Callable[[Progress], Communication | None]
"""What each worker has sent, and will; None where even a run cannot tell."""


def count(
    plan: Plan,
    state: TrainState,
    steps: int,
    workers: int | None = None,
    strategy: Strategy | None = None,
) -> Communication | None:
    """Counts what each worker sends; None where only the run can tell.

    Args:
        plan: of the run.
        state: where it starts.
        steps: of a run.
        workers: as if there were so many; None means those that there are.
        strategy: as if it were this one; None means the plan's.
    """
    try:
        if strategy is None:
            return plan.trainer.communication(state, steps, workers)
        replica = of_one(state.replica)
        return syncalgos.communication(strategy, replica, workers or 1, steps)
    except ValueError:
        return None


def counter(plan: Plan, state: TrainState, sent: Communication | None) -> Count:
    """Counts what each worker sends, of what the data decide on from what they did.

    Args:
        plan: of the run.
        state: where it starts.
        sent: what `count` found for all its steps.
    """
    if sent is not None or not introspection.decides(plan.strategy):
        return lambda progress: sent
    of_taken = plan.trainer.counter(state, plan.settings.steps)
    taken = np.zeros((plan.settings.steps, len(found(state.sync))), bool)

    def count_taken(progress):
        now = taken.copy()  # steps that are yet to come decide on nothing
        if progress.decided:
            now[tuple(np.transpose(progress.decided))] = True
        try:
            return of_taken(now)
        except ValueError:  # it depends on more yet
            return None

    return count_taken


def ends(
    plan: Plan, state: TrainState, steps: int, sent: Communication | None
) -> np.ndarray | None:
    """Finds the local steps that end a round: where the algorithm sends, or would.

    Args:
        plan: of the run.
        state: where it starts.
        steps: of a run.
        sent: what `count` found for them.

    Returns:
        Whether each step does, (steps,); None where only the run can tell.
    """
    workers = max(plan.settings.workers, 2)  # one sends nothing, yet its rounds end
    if plan.task.kept == "shared":  # tables are sent at every step
        sent = count(plan, state, steps, workers, plan.algorithm)
    elif _shares_loss(plan, state):  # that is sent at every step, too
        sent = count(plan, state, steps, workers, plan.strategy)
    elif workers != plan.settings.workers:
        sent = count(plan, state, steps, workers)
    return None if sent is None else np.diff(sent.per_step, prepend=0.0) > 0


def _shares_loss(plan: Plan, state: TrainState) -> bool:
    """Whether workers share their loss, for an inner optimizer that looks at it."""
    if not introspection.reduces(plan.strategy):
        return False
    return inner_step.asks(plan.optimizer, of_one(state.replica), np.float32(0))


def center_step(plan: Plan, rounds: np.ndarray | None, steps: int) -> int:
    """Returns the last local step that is in the center after so many."""
    follows = plan.settings.ema or not introspection.has_center(plan.algorithm)
    if follows or rounds is None:
        return steps
    found = np.flatnonzero(rounds[:steps])
    return int(found[-1]) + 1 if len(found) else 0


def untrained(plan: Plan, state: TrainState, rounds: np.ndarray | None) -> str:
    """Says why the evaluated model never changes, and the way out; "" if it does.

    Args:
        plan: of the run.
        state: where it starts.
        rounds: of `ends`.
    """
    s = plan.settings
    if center_step(plan, rounds, s.steps):
        return ""
    first = _first_sync(plan, state)
    out = [f"--steps {first} or more"] if first else []
    if "period" in plan.arguments:
        out.append(f"--period {s.steps} or less")
    when = f"first syncs after step {first}, beyond" if first else "does not sync in"
    use = f": use {', or '.join(out)}" if out else ""
    return f"{s.algo} {when} these {s.steps} steps{use}"


def _first_sync(plan: Plan, state: TrainState) -> int | None:
    """Returns the steps after which the first round ends; None if it is far away."""
    steps = plan.settings.steps
    while steps < FARTHEST:
        steps = min(2 * steps, FARTHEST)
        rounds = ends(plan, state, steps, count(plan, state, steps))
        if rounds is None:
            return None
        if rounds.any():
            return int(np.argmax(rounds)) + 1
    return None
