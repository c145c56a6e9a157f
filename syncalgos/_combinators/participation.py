"""Simulated workers that skip rounds, or train at their own speed."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncalgos import checks, collectives
from syncalgos._calls import suggest_arguments
from syncalgos._combinators import decided, introspection, own_values, rules
from syncalgos._combinators.schedule import when
from syncalgos._dtypes import narrow, rounded, select, widen
from syncalgos._keys import common_key
from syncalgos.collectives import Axis, PyTree
from syncalgos.collectives._axes import same_on_all
from syncalgos.steps import ALWAYS, NEVER, NO_STEP, Where, while_tracing
from syncalgos.strategy import (
    OwnGrads,
    Replica,
    Strategy,
    apply_reduce,
    apply_sync,
    check_strategy,
    factory,
    keep_replica,
)

Schedule = Callable[[Any, int], Any]


@suggest_arguments
def sampled(fraction: float, *, seed: int = 0, least: int = 1) -> Schedule:
    """Draws a share of the workers at each sync, as a schedule of `participating`.

    Args:
        fraction: the share, above 0 and at most 1; it is rounded to whole workers.
        seed: the seed of the draws, the same on all workers.
        least: the fewest workers to draw, at least 1; if there are fewer, all take
            part.

    Returns:
        A function, (step, workers) -> weights: (workers,) booleans, the same on all
        workers.

    Raises:
        ValueError: a parameter outside its range.

    Example:
        >>> from syncalgos import sampled
        >>> draw = sampled(0.5, seed=0)
        >>> [int(draw(step, 8).sum()) for step in range(3)]
        [4, 4, 4]
    """
    fraction = checks.share("sampled: fraction", fraction)
    seed = checks.seed(seed)
    least = checks.whole("sampled: least", least, least=1)

    return _Draw(fraction, seed, least)


# A function inside `sampled` could not be pickled, and would not show its numbers.
@dataclass(frozen=True)
class _Draw:
    """The schedule that `sampled` returns."""

    fraction: float
    seed: int
    least: int

    def __repr__(self) -> str:
        return f"sampled({self.fraction}, seed={self.seed}, least={self.least})"

    def __call__(self, step: Any, workers: int) -> jax.Array:
        num_drawn = rounded(self.fraction * workers, self.least)  # at most all
        return jax.random.permutation(common_key(self.seed, step), workers) < num_drawn


class ParticipatingState(NamedTuple):
    """State of `participating`.

    Attributes:
        common: the common model c after the last sync, at least float32.
        start: this worker's start s if stale; otherwise (), as s is c.
        strategy: the strategy's state.
    """

    common: PyTree
    start: PyTree
    strategy: PyTree


@factory
def participating(
    strategy: Strategy, schedule: Schedule, *, stale: bool = False
) -> Strategy:
    """Simulates workers that skip rounds, and combines the others by weighted means.

    Let w be a worker's weight at a sync, N the number of workers, c the common model,
    and s and θ the worker's params at the start and the end of its round. In place of
    θ, each worker then contributes

        c + N w / Σw · (θ - s)

    so that the mean over all workers is the weighted mean over those that take part.
    Gradients are multiplied by N w / Σw at each step. If no worker takes part, nothing
    is sent: gradients are zero, and the round continues to the next sync. Optimizer
    state and buffers that are averaged (see `average`) are weighted likewise. So are a
    center that is the mean of replicas and, in `DataParallel`, the center's buffers and
    the metrics.

    What a worker contributes keeps its dtype: in float16, it overflows beyond 65,504.
    Leaves that a strategy returns as they are, and strategies that send nothing, are
    not weighted. In an optax transformation, each reducer weighs what it gets, so that
    a clip in front sees the worker's own gradient; one that sends without a reducer is
    weighted in front, and must be proportional.

    Args:
        strategy: a strategy that combines replicas or gradients by a mean. In a
            `chain`, each member is weighted on its own. Members with the same weights
            must get the same function object: weights of different schedules multiply
            in the means of the center, its buffers and the metrics.
        schedule: (step, workers) -> weights, (workers,), finite and at least 0, the
            same on all workers; a worker of weight 0 skips. See `sampled`.
        stale: whether a worker that skips keeps its whole replica (params, opt_state
            and buffers), as no message reaches it, and contributes all its steps when
            it next takes part, as a slow worker does. Otherwise it starts from the new
            model, like the others. A mean of gradients is the same either way: no step
            is left to contribute.

    Returns:
        A Strategy. State: the strategy's, c, and s if stale, shaped like params. A
        worker that skips sends zeros, which count as sent, as this is a simulation. Its
        residual of error feedback does not change.

    Raises:
        ValueError: the strategy is not a Strategy, both reduces and syncs, is `decided`
            or must act at every step, like `async_diloco`, or weights its workers
            already; or the schedule is not a function. When the state is made: a bad
            weight in the first 1,024 local steps. When it is traced: a strategy of this
            library that does not combine by a mean, such as votes, medians and gossip,
            or that sends its own momentum (your own strategy declares this with
            `syncalgos.collectives.no_mean`); or a strategy that mixes a worker's own
            params or gradients with what the workers send.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, model_averaging, participating
        >>> first_is_away = lambda step, workers: jnp.arange(workers) > 0
        >>> strategy = participating(model_averaging(1), first_is_away)
        >>> loss = lambda x, batch: -x * batch.mean()
        >>> trainer = DataParallel(loss, optax.sgd(1.0), strategy, workers=3)
        >>> moves = jnp.array([[9.0, 1.0, 2.0]])
        >>> state, _ = trainer.run(trainer.init(jnp.float32(0)), moves)
        >>> float(trainer.center(state).params)
        1.5

    Source: McMahan et al., "Communication-efficient learning of deep networks from
    decentralized data", AISTATS 2017 (FedAvg).
    """
    check_strategy("participating", strategy)
    rules.check_combination("participating", strategy)
    if not callable(schedule):
        raise ValueError(
            f"participating: schedule must be a function, got {checks.shown(schedule)}"
        )
    axis = introspection.find_axis(strategy)
    weight_leaf = partial(_weight_leaf, schedule=schedule, stale=stale, axis=axis)
    weighted_strategy = introspection.change_leaf_strategies(weight_leaf, strategy)
    _check_rounds(weighted_strategy)
    return weighted_strategy


def _check_rounds(strategy: Strategy) -> None:
    """Refuses weights by several rounds of params, whose mean is the center."""
    if introspection.has_center(strategy):
        return
    round_ends = set()
    for weighting in introspection.list_weightings(strategy):
        if weighting.round_ends and weighting.of_params:
            round_ends.add(weighting.round_ends)
    members = introspection.walk_strategies(strategy)
    has_phases = any(map(introspection.is_phase, members))
    if len(round_ends) > 1 and not has_phases:
        raise rules.make_error("participating", "unequal rounds")


def _weight_leaf(
    strategy: Strategy, schedule: Schedule, stale: bool, axis: Axis
) -> Strategy:
    """`participating`, for a strategy that combinators must not take apart."""
    syncs = introspection.ever_syncs(strategy)
    reduces = introspection.reduces(strategy)
    if not (syncs or reduces):
        return strategy  # it combines nothing, at no step
    # Cached: a program that is traced later makes the strategy's state again.
    check = cache(partial(_check_weights, schedule))
    inner_reduce = introspection.inner_reduce(strategy)

    def init(params: PyTree) -> ParticipatingState:
        check(collectives.size(axis))
        common = widen(params) if syncs else ()
        start = common if stale else ()
        return ParticipatingState(common, start, strategy.init(params))

    def reduce(
        grads: PyTree, replica: Replica, state: ParticipatingState, step: Any
    ) -> tuple[PyTree, PyTree]:
        def reduce_grads(grads: PyTree) -> tuple[PyTree, PyTree]:
            return inner_reduce(grads, replica, state, step)

        def reduce_weighted(_: jax.Array) -> tuple[PyTree, PyTree]:
            return call_weighted(reduce_grads, grads, traced)

        with collectives.counting(jnp.ones(())):  # what is no mean is refused
            traced = own_values.trace(lambda x: reduce_grads(x)[0], grads, axis)
        if not traced.sends:  # each worker goes on with gradients of its own
            return reduce_grads(grads)
        if traced.mixes:
            raise rules.make_error("participating", "own grads")
        zero_grads = jax.tree.map(jnp.zeros_like, grads)
        return _call_if_any_participates(
            schedule, step, axis, reduce_weighted, (zero_grads, state)
        )

    def sync(
        replica: Replica, state: ParticipatingState, step: Any
    ) -> tuple[Replica, ParticipatingState]:
        def sync_weighted(
            relative_weight: jax.Array,
        ) -> tuple[Replica, ParticipatingState]:
            return _sync_weighted(
                strategy, stale, axis, replica, state, step, relative_weight
            )

        return _call_if_any_participates(
            schedule, step, axis, sync_weighted, (replica, state)
        )

    @Where
    def has_participants(step: Any) -> jax.Array:
        return jnp.sum(_compute_weights(schedule, step, collectives.size(axis))) > 0

    # One strategy without members, as its state is one: combinators must not take it
    # apart.
    landing = introspection.landing_steps(strategy)
    gated_sync = introspection.combination(when(Strategy(sync=sync), landing)).call
    structure = introspection.combination(strategy)
    arrives = structure.arrives
    weighting = introspection.Weighting(
        schedule,
        landing if syncs else None,
        of_params=bool(arrives) and not structure.is_silent,
        stale=stale,
    )
    return strategy._replace(
        init=init,
        reduce=reduce if reduces else inner_reduce,
        sync=introspection.Combination(
            gated_sync if syncs else keep_replica,
            weights=(weighting,),
            arrives=tuple(
                x._replace(steps=x.steps & has_participants) for x in arrives
            ),
        ),
        center=introspection.inner_center(strategy),
        acts=landing if syncs else NEVER,
    )


def weight_like(follower: Strategy, leader: Strategy) -> Strategy:
    """Gives a strategy that is applied at another's syncs the weights of these.

    Raises:
        ValueError: the syncs arrive after several delays.
    """
    weightings = introspection.find_weightings(leader, of_syncs=True)
    delays = set()
    for structure in introspection.combinations(leader):
        if structure.delay is not None:
            delays.add(structure.delay.steps)
    if not weightings:
        return follower
    if len(delays) > 1:
        raise rules.make_error("at_syncs", "unequal delays")

    is_stale = any(weighting.stale for weighting in weightings)

    def schedule(step: Any, workers: int) -> Any:
        sent_step = step - sum(delays)
        return math.prod(
            _find_round_weights(weighting, sent_step, workers)
            for weighting in weightings
        )

    def drop_weights(leaf: Strategy) -> Strategy:
        structure = introspection.combination(leaf)
        if not structure.weights:
            return leaf
        return leaf._replace(sync=replace(structure, weights=()))

    weighted_follower = participating(follower, schedule, stale=is_stale)
    # Its rounds are those of the strategy, which must not count twice.
    return introspection.change_leaf_strategies(drop_weights, weighted_follower)


def call_weighted(
    update: Callable[[PyTree], tuple[PyTree, PyTree]],
    tree: PyTree,
    traced: own_values.Traced,
) -> tuple[PyTree, PyTree]:
    """Calls an update of which only what the worker sends is multiplied by its share.

    Args:
        update: a tree -> (a tree of the same form, a state).
        tree: this worker's values.
        traced: what the update makes of them.

    Returns:
        What the update returns; leaves that it returned as they were are the worker's.
    """
    if not traced.sends:
        return update(tree)
    result, state = update(collectives.weighted(tree))
    return own_values.keep(traced.is_same, tree, result), state


CHECKED_STEPS = 1024
"""The number of local steps whose weights are checked before training."""


def _check_weights(schedule: Schedule, workers: int) -> None:
    """Refuses a schedule that returns anything but weights."""

    def compute_weights(step: jax.Array) -> jax.Array:
        return _compute_weights(schedule, step, workers)

    with while_tracing():
        weights = jax.vmap(compute_weights)(jnp.arange(CHECKED_STEPS))
    if checks.is_traced(weights):  # depends on a number that only the program knows
        return
    weights = np.asarray(weights)  # (steps, workers)
    bad_entries = np.argwhere(~(np.isfinite(weights) & (weights >= 0)))
    for step, worker in bad_entries[:1]:
        raise ValueError(
            "participating: schedule's weights must be finite and at least 0, got "
            f"{weights[step, worker]} for worker {worker} at local step {step}"
        )


def _compute_weights(schedule: Schedule, step: Any, workers: int) -> jax.Array:
    """The schedule's weights at a step, (workers,)."""
    weights = jnp.asarray(schedule(step, workers), float)
    if weights.shape != (workers,):
        raise ValueError(
            "participating: schedule must return a weight for each of the "
            f"{workers} workers, got shape {weights.shape}"
        )
    return weights


def _call_if_any_participates(
    schedule: Schedule, step: Any, axis: Axis, combine: Callable, otherwise: PyTree
) -> PyTree:
    """Calls `combine` with this worker's N w / Σw, if any worker takes part."""
    step = same_on_all(step, axis)
    weights = _compute_weights(schedule, step, collectives.size(axis))
    total = jnp.sum(weights)

    def act() -> PyTree:
        relative_weight = len(weights) * weights[collectives.index(axis)] / total
        with collectives.counting(relative_weight):
            return combine(relative_weight)

    return lax.cond(total > 0, act, lambda: otherwise)


def compute_relative_weight(
    weightings: Sequence[introspection.Weighting],
    step: Any,
    workers: int,
    worker_index: Any,
) -> jax.Array | None:
    """Computes a worker's N w / Σw in a step's round, with w the product of weights.

    Args:
        weightings: the schedules of weights; if there are none, the result is None.
        step: the local step.
        workers: the number of workers.
        worker_index: the worker's number.

    Returns:
        The share. If no worker takes part, it is that among the workers that make local
        steps; see `paced`.
    """
    if not weightings:
        return None
    weights = jnp.ones(workers)
    # Whether a worker moves is known at each step, and comes first.
    for weighting in sorted(weightings, key=lambda x: x.round_ends is not None):
        new_weights = weights * _find_round_weights(weighting, step, workers)
        weights = jnp.where(jnp.sum(new_weights) > 0, new_weights, weights)
    return workers * weights[worker_index] / jnp.sum(weights)


def any_worker_participates(strategy: Strategy, step: Any) -> jax.Array | bool:
    """Whether a worker takes part in the sync of a leaf strategy at this step."""
    workers = collectives.size(introspection.find_axis(strategy))
    weightings = introspection.find_weightings(strategy)
    weights = [_compute_weights(x.schedule, step, workers) for x in weightings]
    return jnp.sum(math.prod(weights)) > 0 if weights else True


def _find_round_weights(
    weighting: introspection.Weighting, step: Any, workers: int
) -> jax.Array:
    """The weights in a step's round; 1 outside of its phase, or if it does not end."""
    counts = True
    last_step = step
    if weighting.round_ends is not None:
        end = weighting.round_ends.next(step)
        counts = end != NO_STEP
        last_step = jnp.where(counts, end, step)
    if weighting.during != ALWAYS:
        counts = jnp.logical_and(counts, weighting.during(step))
    weights = _compute_weights(weighting.schedule, last_step, workers)
    return jnp.where(counts, weights, 1)


def receives(strategy: Strategy, step: Any) -> jax.Array | bool:
    """Whether the result of a leaf strategy's sync reaches this worker.

    It does not reach a worker that skips, if it then keeps its model.
    """
    axis = introspection.find_axis(strategy)
    is_reached = True
    worker_index = collectives.index(axis)
    for weighting in introspection.find_weightings(strategy):
        if weighting.stale:
            weights = _compute_weights(weighting.schedule, step, collectives.size(axis))
            is_reached &= weights[worker_index] > 0
    return is_reached


def _sync_weighted(
    strategy: Strategy,
    stale: bool,
    axis: Axis,
    replica: Replica,
    state: ParticipatingState,
    step: Any,
    relative_weight: jax.Array,
) -> tuple[Replica, ParticipatingState]:
    """A sync to which the worker contributes its moves times its share."""
    weigh = introspection.combination(strategy).weigh
    if weigh is not None:
        strategy = strategy._replace(sync=weigh)

    def sync_params(params: PyTree) -> PyTree:
        contributing_replica = replica._replace(params=params)
        new_replica, _ = apply_sync(
            strategy, contributing_replica, state.strategy, step
        )
        return new_replica.params

    own_params = replica.params
    traced = own_values.trace(sync_params, own_params, axis)
    if traced.mixes:
        raise rules.make_error("participating", "own params")
    if not traced.sends or all(traced.is_same):
        new_replica, inner_state = apply_sync(strategy, replica, state.strategy, step)
        if stale:
            new_replica = _keep_if_skipping(
                relative_weight, new_replica, replica, traced.is_same
            )
        return new_replica, state._replace(strategy=inner_state)

    # Weights apply to moves, not models: so any strategy's mean becomes the weighted
    # mean, also for compressed moves, and no strategy needs to know the weights.
    round_start = state.start if stale else state.common
    moves = jax.tree.map(lambda s, x: x - s, round_start, own_params)
    if weigh is None:
        moves = collectives.weighted(moves)
    contribution = narrow(jax.tree.map(jnp.add, state.common, moves), own_params)
    if weigh is not None and not stale:
        contribution = own_params
    new_replica, inner_state = apply_sync(
        strategy, replica._replace(params=contribution), state.strategy, step
    )
    new_params = own_values.keep(traced.is_same, own_params, new_replica.params)
    new_replica = new_replica._replace(params=new_params)
    common = widen(new_params)
    start = ()
    if stale:
        start = select(relative_weight > 0, common, state.start)
        new_replica = _keep_if_skipping(
            relative_weight, new_replica, replica, traced.is_same
        )
    return new_replica, ParticipatingState(common, start, inner_state)


def _keep_if_skipping(
    relative_weight: jax.Array,
    new_replica: Replica,
    replica: Replica,
    is_same: list[bool],
) -> Replica:
    """Returns the old replica of a worker that skips, as no message reaches it.

    Params that the sync leaves as they are stay the very arrays: `delayed` would
    otherwise take them for a result, and bring back those of the step of sending.
    """
    chosen_replica = select(relative_weight > 0, new_replica, replica)
    params = own_values.keep(is_same, replica.params, chosen_replica.params)
    return chosen_replica._replace(params=params)


class PacedState(NamedTuple):
    """State of `paced`.

    Attributes:
        strategy: the strategy's state.
        done: local steps since the last sync, an int32 scalar.
        params: this worker's params before the local step.
    """

    strategy: PyTree
    done: jax.Array
    params: PyTree


@factory
def paced(strategy: Strategy, local_steps: Sequence[int]) -> Strategy:
    """Simulates slower workers, which take fewer local steps in a round.

    A worker that has taken its steps keeps its params until the next sync. Its
    optimizer state and buffers keep changing; add `reset` or `average("buffers")` if
    that matters. A worker with 0 steps is left out of the engine's means of buffers and
    metrics, but at a sync its model counts like any other.

    Args:
        strategy: any strategy that syncs.
        local_steps: each worker's local steps between two syncs, at least 0.

    Returns:
        A Strategy. State: the strategy's, a copy of params, and a count.

    Raises:
        ValueError: the strategy is not a Strategy, reduces gradients over the workers,
            never syncs, or is `palsgd`; or the counts are not whole numbers; or, when
            the state is made, there is not one count for each worker.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, model_averaging, paced
        >>> strategy = paced(model_averaging(4), [4, 2])  # the second is half as fast
        >>> loss = lambda x, batch: -x * batch.mean()
        >>> trainer = DataParallel(loss, optax.sgd(1.0), strategy, workers=2)
        >>> state, _ = trainer.run(trainer.init(jnp.float32(0)), jnp.ones((4, 2)))
        >>> float(trainer.center(state).params)
        3.0
    """
    check_strategy("paced", strategy)
    if not isinstance(local_steps, Iterable):
        raise ValueError(
            "paced: local_steps must be a list of numbers, got "
            f"{checks.shown(local_steps)}"
        )
    quotas = [
        checks.whole("paced: each of local_steps", quota, least=0)
        for quota in local_steps
    ]
    clock = introspection.combination(strategy).clock
    if clock and clock.averages:  # its mean leaves rests out
        return introspection.rebuild_members(
            strategy, lambda member: paced(member, quotas)
        )
    rules.check_combination("paced", strategy)
    axis = introspection.find_axis(strategy)

    def init(params: PyTree) -> PacedState:
        workers = collectives.size(axis)
        if len(quotas) != workers:
            raise ValueError(
                f"paced: local_steps has {len(quotas)} numbers for {workers} workers: "
                "give one for each worker"
            )
        return PacedState(strategy.init(params), jnp.int32(0), params)

    def moves_at_all(step: Any, workers: int) -> jax.Array:
        return jnp.array(quotas) > 0

    weightings = (introspection.Weighting(moves_at_all, None),) if 0 in quotas else ()

    # At the start of a step: strategies chained behind this one have acted by then.
    def reduce(
        grads: PyTree, replica: Replica, state: PacedState, step: Any
    ) -> tuple[PyTree, PacedState]:
        grads, inner_state = apply_reduce(
            strategy, grads, replica, state.strategy, step
        )
        return grads, state._replace(strategy=inner_state, params=replica.params)

    def sync(
        replica: Replica, state: PacedState, step: Any
    ) -> tuple[Replica, PacedState]:
        takes_step = state.done < jnp.array(quotas)[collectives.index(axis)]
        params = select(takes_step, replica.params, state.params)
        paced_replica = replica._replace(params=params)
        replica, inner_state = strategy.sync(paced_replica, state.strategy, step)
        decisions = decided.find_decisions(inner_state).values()
        has_decided = [decision.at == step for decision in decisions]
        lands = introspection.lands(strategy, step, voted=False)
        has_synced = jnp.array([*has_decided, lands]).any()
        steps_since_sync = jnp.where(has_synced, 0, state.done + 1)
        return replica, state._replace(strategy=inner_state, done=steps_since_sync)

    return strategy._replace(
        init=init,
        reduce=OwnGrads(reduce),
        sync=introspection.Combination(
            sync,
            (strategy,),
            lambda member: paced(member, quotas),
            clock=introspection.Clock(quota=max(quotas, default=0)),
            weights=weightings,
        ),
        center=introspection.inner_center(strategy),
        acts=None,
    )
