"""The rounds of a run: their ends, bytes and center, and how far workers move in them.

A round is a sequence of local steps that ends with a step at which anything is sent.

A displacement dᵢ is the change of worker i's params from right after one sync to right
before the next. The pseudo-gradient is -mean(d). The mean of cos(dᵢ, dⱼ) over pairs of
workers measures their agreement: 1 if all see the same data, 0 if noise dominates.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import syncalgos
from experiments.training.plan import RunPlan, Timetable, is_custom
from experiments.training.progress import DISPLACEMENTS, Progress
from syncalgos import Communication, Replica, Strategy, TrainState

FARTHEST = 2**12  # steps within which the first sync is looked for

_read_metrics = jax.jit(syncalgos.sync_metrics)  # by one program, not five
Count = Callable[[Progress], Communication | None]
"""Returns a worker's communication from a Progress; None if it is unknown."""


class Rounds(NamedTuple):
    """The rounds of a run, as far as they are known before it trains.

    Attributes:
        communication: returns what a worker sends at most in the whole run.
        is_fixed: whether this depends on the step only.
        ends: whether a round ends at each step, (steps,); None if only the run decides.
        center_steps: the last local step that the evaluated model includes, after 0, 1,
            … local steps; None if only the run decides.
        unsynced: the reason why no sync comes, with a remedy; "" if one comes.
    """

    communication: Count
    is_fixed: bool
    ends: np.ndarray | None
    center_steps: np.ndarray | None
    unsynced: str = ""

    @property
    def untrained(self) -> str:
        """The reason why the evaluated model never changes, and a remedy; or ""."""
        is_trained = self.center_steps is None or self.center_steps.any()
        return "" if is_trained else self.unsynced

    def center_step(self, steps: int) -> int:
        """Returns the last local step that the center includes after these steps."""
        return steps if self.center_steps is None else int(self.center_steps[steps])

    @property
    def first_use(self) -> int | None:
        """The number of local steps after which the evaluated model first changes."""
        if self.center_steps is None or not self.center_steps.any():
            return None
        return int(np.flatnonzero(self.center_steps)[0])

    def count_bytes(self, progress: Progress) -> float | int | None:
        """Returns the most bytes that a worker has sent; None if they are not known."""
        communication = self.communication(progress)
        if communication is None or progress.sent_before is None:
            return None
        # After each number of steps.
        total = np.concatenate([[0.0], communication.per_step])
        new_bytes = float(total[progress.step] - total[progress.sent_since])
        count = progress.sent_before + new_bytes
        return int(count) if count.is_integer() else count


def find_ends(
    plan: RunPlan,
    replica: Replica,
    steps: int,
    communication: Communication | None = None,
) -> np.ndarray | None:
    """Returns whether each local step ends a round, because something is sent.

    Args:
        plan: the plan of the run.
        replica: one worker's replica, arrays or their shapes.
        steps: the number of steps.
        communication: that of the run's trainer over these steps, if known.

    Returns:
        (steps,) booleans; None if only the run decides.
    """
    if communication is None or not _counts_run(plan):
        try:
            communication = syncalgos.communication(
                _make_evaluated_strategy(plan),
                replica,
                workers=max(plan.config.workers, 2),
                steps=steps,
            )
        except (ValueError, jax.errors.ConcretizationTypeError):
            return None  # the engine reports the latter with the first state
    return np.diff(communication.per_step, prepend=0.0) > 0


def _counts_run(plan: RunPlan) -> bool:
    """Whether a round ends exactly where the trainer of a run sends anything.

    One worker sends nothing, but its rounds end. Shared tables, and the loss that an
    optimizer uses, are sent at every step and must not count.
    """
    # An inner optimizer may use the loss, which workers that combine gradients share.
    may_share_loss = syncalgos.describe(plan.method.strategy).combines_grads
    is_shared = plan.task.kept == "shared"
    return not (is_shared or plan.config.workers == 1 or may_share_loss)


def plan_rounds(plan: RunPlan, state: TrainState) -> Rounds:
    """Returns the rounds of a run; displacements must not be measured in its state."""
    c = plan.config
    replica = _shapes_of_one(state.replica)
    try:
        communication = plan.trainer.communication(state, c.steps)
    except ValueError:  # only the run decides
        communication = None
    timetable = find_timetable(plan, replica, communication)
    return Rounds(
        communication=_make_count(plan, state, communication),
        is_fixed=communication is not None,
        ends=timetable.ends,
        center_steps=timetable.center_steps,
        unsynced=timetable.unsynced,
    )


def find_timetable(
    plan: RunPlan, replica: Replica, communication: Communication | None
) -> Timetable:
    """Returns the timetable of a run, which runs of the same programs often share.

    Args:
        plan: the plan of the run.
        replica: one worker's replica, arrays or their shapes.
        communication: that of the run's trainer, if it is known in advance.
    """
    earlier = plan.programs.timetable
    if earlier is not None and _keeps_time(plan, replica, communication, earlier):
        return earlier
    timetable = _make_timetable(plan, replica, communication)
    plan.programs.timetable = timetable
    return timetable


def _keeps_time(
    plan: RunPlan,
    replica: Replica,
    communication: Communication | None,
    earlier: Timetable,
) -> bool:
    """Whether a run has an earlier run's timetable; False if that is not sure."""
    if is_custom(plan.config.algo):  # it may do other than it declares
        return False
    # Sets of steps are equal if no number decides them.
    description = syncalgos.describe(plan.method.strategy)
    if (earlier.acts, earlier.lands) != (description.acts, description.lands):
        return False
    if communication is None or not _counts_run(plan):
        return True
    ends = find_ends(plan, replica, plan.config.steps, communication)
    if ends is None or earlier.ends is None:
        return False
    return (ends == earlier.ends).all()


def _make_timetable(
    plan: RunPlan, replica: Replica, communication: Communication | None
) -> Timetable:
    """Finds the ends of the rounds, and what the center includes after each step."""
    c = plan.config
    ends = find_ends(plan, replica, c.steps, communication)
    center_steps = _center_steps(plan, ends, c.steps)
    run_description = syncalgos.describe(plan.method.strategy)
    timetable = Timetable(
        run_description.acts, run_description.lands, ends, center_steps
    )
    is_trained = center_steps is None or center_steps.any()
    if ends is None or (ends.any() and is_trained):
        return timetable
    description = syncalgos.describe(_make_evaluated_strategy(plan), workers=c.workers)
    first_change = _first_change(plan, replica)
    # Each worker's center may change on its own.
    sends_nothing = first_change is None and not ends.any()
    if sends_nothing and description.acting_steps(c.steps).size:
        return timetable._replace(
            unsynced=(
                f"{c.algo} sends nothing, as its sync and reduce call no collective"
            ),
            center_steps=np.arange(c.steps + 1),
        )
    unsynced = _describe_no_sync(plan, first_change, is_late=bool(ends.any()))
    return timetable._replace(unsynced=unsynced)


def _describe_no_sync(plan: RunPlan, first_change: int | None, is_late: bool) -> str:
    """Says that the model does not change in a run, and what would change it.

    Args:
        plan: the plan of the run.
        first_change: the local steps after which the model first changes; None if that
            was not found.
        is_late: whether something is sent, but arrives only after the run.
    """
    c = plan.config
    has_period = "period" in c.arguments
    if first_change is None and has_period:
        return (
            f"{c.algo} does not sync in these {c.steps} steps: use --period {c.steps} "
            "or less"
        )
    if first_change is None:
        return f"{c.algo} does not sync in these {c.steps} steps"
    remedy = f"use --steps {first_change} or more"
    if has_period:
        # The first change comes later in proportion to the period.
        longest_period = c.arguments["period"] * c.steps // first_change
        if longest_period:
            remedy += f", or --period {longest_period} or less"
    if is_late:
        return (
            f"{c.algo} first uses a sync after step {first_change}, beyond these "
            f"{c.steps} steps: {remedy}"
        )
    return (
        f"{c.algo} first syncs after step {first_change}, beyond these {c.steps} "
        f"steps: {remedy}"
    )


def _make_count(
    plan: RunPlan, state: TrainState, communication: Communication | None
) -> Count:
    """Returns a function that counts the sends, with the data's decisions so far."""
    num_decisions = count_decisions(state)
    if communication is not None or not num_decisions:
        return lambda progress: communication
    count_decided = plan.trainer.counter(state, plan.config.steps)

    def count(progress: Progress) -> Communication | None:
        # Later steps count as without a sync.
        decisions = np.zeros((plan.config.steps, num_decisions), bool)
        if progress.decided:
            decisions[tuple(np.transpose(progress.decided))] = True
        try:
            return count_decided(decisions)
        except ValueError:  # the sends depend on more than those decisions
            return None

    return count


def count_decisions(state: TrainState) -> int:
    """Returns how many decisions by data a strategy takes at a step."""
    metrics = jax.eval_shape(syncalgos.sync_metrics, state.sync, 0)
    if "decided" not in metrics:
        return 0
    return metrics["decided"].size


def _shapes_of_one(replicas: Replica) -> Any:
    """Returns the shapes of one worker's replica, without the axes of the workers."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), replicas)


def _make_evaluated_strategy(plan: RunPlan) -> Strategy:
    """The strategy of the evaluated model; shared tables beside it always change."""
    is_shared = plan.task.kept == "shared"
    return plan.method.algorithm if is_shared else plan.method.strategy


def _center_steps(
    plan: RunPlan, ends: np.ndarray | None, steps: int
) -> np.ndarray | None:
    """Returns the last local step that the evaluated model includes after each step.

    Args:
        plan: the plan of the run.
        ends: whether each local step ends a round, where something is sent.
        steps: the number of steps.

    Returns:
        (steps + 1,) whole numbers; None if only the run decides.
    """
    description = syncalgos.describe(
        _make_evaluated_strategy(plan), workers=plan.config.workers
    )
    if description.has_center and ends is None:
        return None
    return description.included_steps(steps, undeclared=ends)


def _first_change(plan: RunPlan, replica: Replica) -> int | None:
    """Returns the steps after which the center has changed; None if too many."""
    steps = plan.config.steps
    while steps < FARTHEST:
        steps = min(2 * steps, FARTHEST)
        ends = find_ends(plan, replica, steps)
        center_steps = _center_steps(plan, ends, steps)
        if ends is None or center_steps is None:
            return None
        if syncalgos.describe(_make_evaluated_strategy(plan)).has_center:
            if center_steps.any():
                return int(np.flatnonzero(center_steps)[0])
        elif ends.any():
            return int(np.flatnonzero(ends)[0]) + 1
    return None


def record_displacements(
    strategy: Strategy, sync_steps: np.ndarray, evaluations: Sequence[int]
) -> Strategy:
    """Returns the same strategy, which also records the displacements of some rounds.

    For each evaluation, the last round that ended before it is measured. What measuring
    sends, `communication` would count: call it with the plain strategy instead.

    Args:
        strategy: the strategy of a whole run.
        sync_steps: whether anything is sent at each step, (steps,) booleans.
        evaluations: local steps done at each evaluation.

    Returns:
        A Strategy: see `syncalgos.measured`.
    """
    last_steps = np.flatnonzero(sync_steps)  # of all rounds
    ended_rounds = np.searchsorted(last_steps, np.asarray(evaluations, int))
    measured_rounds = np.unique(ended_rounds[ended_rounds > 0]) - 1
    is_measured = np.zeros(len(sync_steps), bool)
    is_measured[last_steps[measured_rounds]] = True
    return syncalgos.measured(
        strategy,
        by_leaf=False,
        ends=partial(_holds, np.asarray(sync_steps, bool)),
        only=partial(_holds, is_measured),
    )


def figures(state: TrainState, ends: np.ndarray | None) -> dict[str, float]:
    """Returns the displacements in the last round.

    Args:
        state: a state of the engine.
        ends: whether a round ends at each step, (steps,) booleans; None: not known.

    Returns:
        pseudo_gradient, the 2-norm over all params that the strategy sees;
        displacement_cosine, the mean over pairs of workers; and drift, the root mean
        square distance of replicas to their mean, right before the sync. All are NaN if
        no round has ended yet, or it was not measured. The cosine is NaN if there is
        one worker, or one did not move.
    """
    unknown: dict[str, float] = dict.fromkeys(DISPLACEMENTS, np.nan)
    if ends is None:
        return unknown
    ended_steps = np.flatnonzero(ends[: state.step])
    if not ended_steps.size:
        return unknown
    # One worker of this process; all have the same.
    own_state = jax.tree.map(lambda x: x.addressable_shards[0].data, state.sync)
    metrics = jax.device_get(_read_metrics(own_state, ended_steps[-1]))
    if "measured" not in metrics:
        return unknown
    move, spread, cosine, _ = (float(x[0]) for x in metrics["measured"])
    # A run that was resumed with other evaluations has not measured the same rounds.
    if move == spread == cosine == 0:  # in a round without a move, the cosine is -2
        return unknown
    return {
        "pseudo_gradient": move,
        "displacement_cosine": cosine if cosine >= -1 else np.nan,
        "drift": spread,
    }


def _holds(table: np.ndarray, step: jax.Array) -> jax.Array:
    return jnp.asarray(table).at[step].get(mode="fill", fill_value=False)
