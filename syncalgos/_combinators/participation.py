"""Simulated workers that skip rounds, or train at their own speed."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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

    def weights(step, workers):
        chosen = rounded(fraction * workers, least)  # with fewer workers, all
        return jax.random.permutation(common_key(seed, step), workers) < chosen

    return weights


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
    not weighted. An optax transformation in front of a reducer must be proportional, as
    momentum is: clip in a `reduce_with` of its own.

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
    rules.check("participating", strategy)
    if not callable(schedule):
        got = checks.shown(schedule)
        raise ValueError(f"participating: schedule must be a function, got {got}")
    axis = introspection.axis_of(strategy)
    weigh = partial(_participating, schedule=schedule, stale=stale, axis=axis)
    weighted = introspection.innermost(weigh, strategy)
    _check_rounds(weighted)
    return weighted


def _check_rounds(strategy: Strategy) -> None:
    """Refuses weights by several rounds of params, whose mean is the center."""
    if introspection.has_center(strategy):
        return
    round_ends = {
        rounds.lands
        for rounds in introspection.rounds_of_members(strategy)
        if rounds.lands and rounds.of_params
    }
    has_phases = any(map(introspection.is_phase, introspection.parts(strategy)))
    if len(round_ends) > 1 and not has_phases:
        raise rules.make_error("participating", "unequal rounds")


def _participating(strategy, schedule, stale, axis) -> Strategy:
    """`participating`, for a whole."""
    syncs = introspection.ever_syncs(strategy)
    reduces = introspection.reduces(strategy)
    if not (syncs or reduces):
        return strategy  # it combines nothing, at no step
    # Cached: a program that is traced later makes the strategy's state again.
    check = cache(partial(_check_weights, schedule))
    inner = introspection.inner_reduce(strategy)

    def init(params):
        check(collectives.size(axis))
        common = widen(params) if syncs else ()
        start = common if stale else ()
        return ParticipatingState(common, start, strategy.init(params))

    def reduce(grads, replica, state, step):
        def reduce_grads(grads):
            return inner(grads, replica, state, step)

        def weighted(_):
            return call_weighted(reduce_grads, grads, traced)

        with collectives.counting(jnp.ones(())):  # what is no mean is refused
            traced = own_values.trace(lambda x: reduce_grads(x)[0], grads, axis)
        if not traced.sends:  # each worker goes on with gradients of its own
            return reduce_grads(grads)
        if traced.mixes:
            raise rules.make_error("participating", "own grads")
        none = jax.tree.map(jnp.zeros_like, grads), state
        return _among(schedule, step, axis, weighted, none)

    def sync(replica, state, step):
        def weighted(share):
            new_replica, new_state = _weighted_sync(
                strategy, stale, axis, replica, state, step, share
            )
            if stale:  # no message reaches a worker that skips
                new_replica = select(share > 0, new_replica, replica)
            return new_replica, new_state

        return _among(schedule, step, axis, weighted, (replica, state))

    @Where
    def any_worker_participates(step):
        return jnp.sum(_weights(schedule, step, collectives.size(axis))) > 0

    # A whole, as its state is one: combinators must not take it apart.
    landing = introspection.landing_steps(strategy)
    gated = introspection.combination(when(Strategy(sync=sync), landing)).call
    described = introspection.combination(strategy)
    arrives = described.arrives
    weighting = introspection.Rounds(
        schedule,
        landing if syncs else None,
        of_params=bool(arrives) and not described.is_silent,
        stale=stale,
    )
    return strategy._replace(
        init=init,
        reduce=reduce if reduces else inner,
        sync=introspection.Combination(
            gated if syncs else keep_replica,
            weights=(weighting,),
            arrives=tuple(
                x._replace(steps=x.steps & any_worker_participates) for x in arrives
            ),
        ),
        center=introspection.inner_center(strategy),
        acts=landing if syncs else NEVER,
    )


def as_weighted(extra: Strategy, strategy: Strategy) -> Strategy:
    """Gives a strategy that is applied at another's syncs the weights of these.

    Raises:
        ValueError: the syncs arrive after several delays.
    """
    rounds = introspection.rounds(strategy, of_syncs=True)
    delays = {
        described.delay.steps
        for described in introspection.combinations(strategy)
        if described.delay is not None
    }
    if not rounds:
        return extra
    if len(delays) > 1:
        raise rules.make_error("at_syncs", "unequal delays")

    is_stale = any(each.stale for each in rounds)

    def schedule(step, workers):
        return math.prod(_weights_in(x, step - sum(delays), workers) for x in rounds)

    def uncounted(whole):
        described = introspection.combination(whole)
        if not described.weights:
            return whole
        return whole._replace(sync=replace(described, weights=()))

    weighted = participating(extra, schedule, stale=is_stale)
    # Its rounds are those of the strategy, which must not count twice.
    return introspection.innermost(uncounted, weighted)


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


LOOKED_AT = 1024
"""The number of local steps whose weights are checked before training."""


def _check_weights(schedule: Schedule, workers: int) -> None:
    """Refuses a schedule that returns anything but weights."""
    with while_tracing():
        steps = jnp.arange(LOOKED_AT)
        found = jax.vmap(lambda step: _weights(schedule, step, workers))(steps)
    if checks.is_traced(found):  # depends on a number that only the program knows
        return
    found = np.asarray(found)
    wrong = np.argwhere(~(np.isfinite(found) & (found >= 0)))
    for step, worker in wrong[:1]:
        raise ValueError(
            "participating: schedule's weights must be finite and at least 0, got "
            f"{found[step, worker]} for worker {worker} at local step {step}"
        )


def _weights(schedule: Schedule, step: Any, workers: int) -> jax.Array:
    """The schedule's weights at a step, (workers,)."""
    weights = jnp.asarray(schedule(step, workers), float)
    if weights.shape != (workers,):
        raise ValueError(
            "participating: schedule must return a weight for each of the "
            f"{workers} workers, got shape {weights.shape}"
        )
    return weights


def _among(
    schedule: Schedule, step: Any, axis: Axis, weighted: Callable, otherwise: PyTree
) -> PyTree:
    """Calls `weighted` with this worker's N w / Σw, if any worker takes part."""
    weights = _weights(schedule, step, collectives.size(axis))
    total = jnp.sum(weights)

    def act():
        share = len(weights) * weights[collectives.index(axis)] / total
        with collectives.counting(share):
            return weighted(share)

    return lax.cond(total > 0, act, lambda: otherwise)


def share_in(
    rounds: Sequence[introspection.Rounds], step: Any, workers: int, me: Any
) -> jax.Array | None:
    """Computes a worker's N w / Σw in a step's round, with w the product of weights.

    Args:
        rounds: the schedules of weights; if there are none, the result is None.
        step: the local step.
        workers: the number of workers.
        me: the worker's number.

    Returns:
        The share. If no worker takes part, it is that among the workers that make local
        steps; see `paced`.
    """
    if not rounds:
        return None
    weights = jnp.ones(workers)
    # Whether a worker moves is known at each step, and comes first.
    for each in sorted(rounds, key=lambda each: each.lands is not None):
        more = weights * _weights_in(each, step, workers)
        weights = jnp.where(jnp.sum(more) > 0, more, weights)
    return workers * weights[me] / jnp.sum(weights)


def anyone(strategy: Strategy, step: Any) -> jax.Array | bool:
    """Whether a worker takes part in the sync of a whole at this step."""
    workers = collectives.size(introspection.axis_of(strategy))
    rounds = introspection.rounds(strategy)
    weights = [_weights(each.schedule, step, workers) for each in rounds]
    return jnp.sum(math.prod(weights)) > 0 if weights else True


def _weights_in(each: introspection.Rounds, step: Any, workers: int) -> jax.Array:
    """The weights in a step's round; 1 outside of its phase, or if it does not end."""
    counts, last = True, step
    if each.lands is not None:
        end = each.lands.next(step)
        counts = end != NO_STEP
        last = jnp.where(counts, end, step)
    if each.during != ALWAYS:
        counts = jnp.logical_and(counts, each.during(step))
    return jnp.where(counts, _weights(each.schedule, last, workers), 1)


def receives(strategy: Strategy, step: Any) -> jax.Array | bool:
    """Whether the result of a whole's sync at this step reaches this worker.

    It does not reach a worker that skips, if it then keeps its model.
    """
    axis = introspection.axis_of(strategy)
    is_reached = True
    me = collectives.index(axis)
    for rounds in introspection.rounds(strategy):
        if rounds.stale:
            weights = _weights(rounds.schedule, step, collectives.size(axis))
            is_reached &= weights[me] > 0
    return is_reached


def _weighted_sync(
    strategy: Strategy,
    stale: bool,
    axis: Axis,
    replica: Replica,
    state: ParticipatingState,
    step: Any,
    share: jax.Array,
) -> tuple[Replica, ParticipatingState]:
    """A sync to which the worker contributes its moves times its share."""
    weigh = introspection.combination(strategy).weigh
    if weigh is not None:
        strategy = strategy._replace(sync=weigh)

    def sync_params(params):
        handed_in = replica._replace(params=params)
        return apply_sync(strategy, handed_in, state.strategy, step)[0].params

    own = replica.params
    traced = own_values.trace(sync_params, own, axis)
    if traced.mixes:
        raise rules.make_error("participating", "own params")
    if not traced.sends or all(traced.is_same):
        new, inner = apply_sync(strategy, replica, state.strategy, step)
        return new, state._replace(strategy=inner)

    # Weights apply to moves, not models: so any strategy's mean becomes the weighted
    # mean, also for compressed moves, and no strategy needs to know the weights.
    began = state.start if stale else state.common
    moved = jax.tree.map(lambda s, x: x - s, began, own)
    if weigh is None:
        moved = collectives.weighted(moved)
    handed_in = narrow(jax.tree.map(jnp.add, state.common, moved), own)
    if weigh is not None and not stale:
        handed_in = own
    new, inner = apply_sync(
        strategy, replica._replace(params=handed_in), state.strategy, step
    )
    new = new._replace(params=own_values.keep(traced.is_same, own, new.params))
    common, start = widen(new.params), ()
    if stale:
        start = select(share > 0, common, state.start)
    return new, ParticipatingState(common, start, inner)


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
    outer_clock = introspection.combination(strategy).clock
    if outer_clock and outer_clock.averages:  # its mean leaves rests out
        return introspection.rebuilt(strategy, lambda member: paced(member, quotas))
    rules.check("paced", strategy)
    axis = introspection.axis_of(strategy)

    def init(params):
        workers = collectives.size(axis)
        if len(quotas) != workers:
            raise ValueError(
                f"paced: local_steps has {len(quotas)} numbers for {workers} workers: "
                "give one for each worker"
            )
        return PacedState(strategy.init(params), jnp.int32(0), params)

    def moves_at_all(step, workers):
        return jnp.array(quotas) > 0

    rests = (introspection.Rounds(moves_at_all, None),) if 0 in quotas else ()

    # At the start of a step: strategies chained behind this one have acted by then.
    def reduce(grads, replica, state, step):
        grads, inner = apply_reduce(strategy, grads, replica, state.strategy, step)
        return grads, state._replace(strategy=inner, params=replica.params)

    def sync(replica, state, step):
        moves = state.done < jnp.array(quotas)[collectives.index(axis)]
        held = replica._replace(params=select(moves, replica.params, state.params))
        replica, inner = strategy.sync(held, state.strategy, step)
        agreed = [decision.at == step for decision in decided.found(inner).values()]
        synced = jnp.array([*agreed, introspection.lands(strategy, step, voted=False)])
        done = jnp.where(synced.any(), 0, state.done + 1)
        return replica, state._replace(strategy=inner, done=done)

    return strategy._replace(
        init=init,
        reduce=OwnGrads(reduce),
        sync=introspection.Combination(
            sync,
            (strategy,),
            lambda member: paced(member, quotas),
            clock=introspection.Clock(quota=max(quotas, default=0)),
            weights=rests,
        ),
        center=introspection.inner_center(strategy),
        acts=None,
    )
