"""The rounds of a run: their ends, bytes and center, and how far workers move in them.

A round is a sequence of local steps that ends with a step at which anything is sent.

A displacement dᵢ is the change of worker i's params from right after one sync to right
before the next. The pseudo-gradient is -mean(d). The mean of cos(dᵢ, dⱼ) over pairs of
workers measures their agreement: 1 if all see the same data, 0 if noise dominates.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import syncalgos
from experiments.training.plan import Plan
from experiments.training.progress import DISPLACEMENTS, Progress
from syncalgos import Communication, Replica, Strategy, TrainState
from syncalgos.combinators import introspection
from syncalgos.combinators.decided import found
from syncalgos.combinators.measured import NONE, Noted
from syncalgos.combinators.primitives import lag
from syncalgos.engine import inner_step
from syncalgos.engine.state import of_one

FARTHEST = 2**12  # steps within which the first sync is looked for

Count = Callable[[Progress], Communication | None]
"""Returns a worker's communication from a Progress; None if it is unknown."""


class Rounds(NamedTuple):
    """The rounds of a run, as far as they are known before it trains.

    Attributes:
        sent: returns what a worker sends at most in the whole run.
        is_fixed: whether this depends on the step only.
        ends: whether a round ends at each step, (steps,); None if only the run decides.
        is_followed: whether the evaluated model changes at every step.
        lag: the number of last rounds whose results arrive only at later ends.
        unsynced: the reason why no sync comes, with a remedy; "" if one comes.
    """

    sent: Count
    is_fixed: bool
    ends: np.ndarray | None
    is_followed: bool
    lag: int = 0
    unsynced: str = ""

    @property
    def untrained(self) -> str:
        """The reason why the evaluated model never changes, and a remedy; or ""."""
        return "" if self.is_followed else self.unsynced

    def center_step(self, steps: int) -> int:
        """Returns the last local step that the center includes after these steps."""
        if self.is_followed or self.ends is None:
            return steps
        found = np.flatnonzero(self.ends[:steps])
        return int(found[-1 - self.lag]) + 1 if len(found) > self.lag else 0

    def bytes_by(self, progress: Progress) -> float | int | None:
        """Returns the most bytes that a worker has sent; None if they are not known."""
        sent = self.sent(progress)
        if sent is None or progress.sent_before is None:
            return None
        total = np.concatenate([[0.0], sent.per_step])  # after each number of steps
        since = float(total[progress.step] - total[progress.sent_since])
        count = progress.sent_before + since
        return int(count) if count.is_integer() else count


def ends_of(
    plan: Plan, replica: Replica, steps: int, sent: Communication | None = None
) -> np.ndarray | None:
    """Returns whether each local step ends a round, because something is sent.

    Args:
        plan: the plan of the run.
        replica: one worker's replica, arrays or their shapes.
        steps: the number of steps.
        sent: the communication of the run's trainer over these steps, if known.

    Returns:
        (steps,) booleans; None if only the run decides.
    """
    strategy, is_shared = plan.method.strategy, plan.task.kept == "shared"
    # An inner optimizer may use the loss, which workers that reduce gradients share.
    shares_loss = introspection.reduces(strategy) and inner_step.asks(
        plan.method.optimizer, replica, np.float32(0)
    )
    # One worker sends nothing, but its rounds end. Shared tables, and the loss that an
    # optimizer uses, are sent at every step and must not count.
    if is_shared or plan.config.workers == 1 or shares_loss:
        sent, strategy = None, plan.method.algorithm if is_shared else strategy
    if sent is None:
        try:
            sent = syncalgos.communication(
                strategy, replica, workers=max(plan.config.workers, 2), steps=steps
            )
        except (ValueError, jax.errors.ConcretizationTypeError):
            return None  # the engine reports the latter with the first state
    return np.diff(sent.per_step, prepend=0.0) > 0


def planned(plan: Plan, state: TrainState) -> Rounds:
    """Returns the rounds of a run; displacements must not be measured in its state."""
    c, replica = plan.config, of_one(state.replica)
    try:
        sent = plan.trainer.communication(state, c.steps)
    except ValueError:  # only the run decides
        sent = None
    ends = ends_of(plan, replica, c.steps, sent)
    rounds = Rounds(
        sent=_count(plan, state, sent),
        is_fixed=sent is not None,
        ends=ends,
        is_followed=not introspection.has_center(plan.method.algorithm),
        lag=lag(state.sync),
    )
    if ends is None or ends.sum() > rounds.lag:
        return rounds
    first = _first_change(plan, replica, rounds.lag)
    acts = partial(introspection.acts, plan.method.algorithm)
    acting = jax.vmap(lambda step: jnp.asarray(acts(step)))(jnp.arange(c.steps))
    # Each worker's center may change on its own.
    if not (first or ends.any()) and acting.any():
        why = f"{c.algo} sends nothing, as its sync and reduce call no collective"
        return rounds._replace(is_followed=True, unsynced=why)
    out = [f"--steps {first} or more"] if first else []
    if "period" in c.arguments and (longest := c.steps // (1 + rounds.lag)):
        out.append(f"--period {longest} or less")
    verb = "uses a sync" if rounds.lag else "syncs"
    when = f"first {verb} after step {first}, beyond" if first else "does not sync in"
    use = f": use {', or '.join(out)}" if out else ""
    return rounds._replace(unsynced=f"{c.algo} {when} these {c.steps} steps{use}")


def _count(plan: Plan, state: TrainState, sent: Communication | None) -> Count:
    """Returns a function that counts the sends, with the data's decisions so far."""
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
        except ValueError:  # the sends depend on more than those decisions
            return None

    return count_taken


def _first_change(plan: Plan, replica: Replica, before: int) -> int | None:
    """Returns the steps to the round after `before` others; None if too many."""
    steps = plan.config.steps
    while steps < FARTHEST:
        steps = min(2 * steps, FARTHEST)
        ends = ends_of(plan, replica, steps)
        if ends is None:
            return None
        if ends.sum() > before:
            return int(np.flatnonzero(ends)[before]) + 1
    return None


def measured(
    strategy: Strategy, sync_steps: np.ndarray, evaluated: Sequence[int]
) -> Strategy:
    """Returns the same strategy, which also records the displacements of some rounds.

    For each evaluation, the last round that ended before it is measured. What measuring
    sends, `communication` would count: call it with the plain strategy instead.

    Args:
        strategy: the strategy of a whole run.
        sync_steps: whether anything is sent at each step, (steps,) booleans.
        evaluated: local steps done at each evaluation.

    Returns:
        A Strategy: see `syncalgos.measured`.
    """
    lasts = np.flatnonzero(sync_steps)  # of all rounds
    ended = np.searchsorted(lasts, np.asarray(evaluated, int))  # rounds by then
    only = np.zeros(len(sync_steps), bool)
    only[lasts[np.unique(ended[ended > 0]) - 1]] = True
    ends = partial(_holds, np.asarray(sync_steps, bool))
    return syncalgos.measured(
        strategy, by_leaf=False, ends=ends, only=partial(_holds, only)
    )


def figures(state: TrainState, ends: np.ndarray | None = None) -> dict[str, float]:
    """Returns the displacements in the last round.

    Args:
        state: a state of the engine.
        ends: whether a round ends at each step; None: take the last measured round.

    Returns:
        pseudo_gradient, the 2-norm over all params that the strategy sees;
        displacement_cosine, the mean over pairs of workers; and drift, the root mean
        square distance of replicas to their mean, right before the sync. All are NaN if
        no round has ended yet, or it was not measured. The cosine is NaN if there is
        one worker, or one did not move.
    """
    noted = optax.tree.get(
        state.sync, "noted", filtering=lambda _, x: isinstance(x, Noted)
    )
    if noted is None:
        return dict.fromkeys(DISPLACEMENTS, np.nan)
    # One worker of this process; all have the same.
    at, values = (np.asarray(x.addressable_shards[0].data) for x in noted)
    # A run that was resumed with other evaluations has not measured the same rounds.
    if ends is not None and at.flat[0] not in np.flatnonzero(ends[: state.step])[-1:]:
        return dict.fromkeys(DISPLACEMENTS, np.nan)
    move, spread, cosine, _ = values.reshape(-1, 4)[0]
    found = zip(DISPLACEMENTS, (move, cosine, spread), strict=True)
    return {name: float(x) if x > NONE else np.nan for name, x in found}


def _holds(table: np.ndarray, step: jax.Array) -> jax.Array:
    return jnp.asarray(table).at[step].get(mode="fill", fill_value=False)
