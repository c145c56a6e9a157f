"""Workers that take part in some rounds only, or at their own speed: simulated."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.combinators.introspection import (
    Combination,
    check_undecided,
    combination,
    ever_syncs,
    inner_center,
    inner_reduce,
    innermost,
    lands,
    reduces,
)
from syncalgos.combinators.schedule import when
from syncalgos.dtypes import narrow, widen
from syncalgos.keys import common_key
from syncalgos.strategy import (
    Strategy,
    changes_params,
    check_strategy,
    keep_grads,
    keep_replica,
)

Schedule = Callable[[Any, int], Any]


def sampled(fraction: float, seed: int = 0, least: int = 1) -> Schedule:
    """A schedule of `participating`: at each sync a share of the workers, drawn anew.

    Args:
        fraction: the share, rounded to whole workers; above 0, at most 1.
        seed: of the draws, the same on all workers.
        least: the fewest workers that are drawn, where there are so many; at least 1.

    Raises:
        ValueError: a parameter outside its range.
    """
    fraction = checks.share("sampled: fraction", fraction)
    seed = checks.whole("seed", seed, least=0)
    least = checks.whole("sampled: least", least, least=1)

    def weights(step, workers):
        chosen = max(least, round(fraction * workers))  # of fewer workers, all
        return jax.random.permutation(common_key(seed, step), workers) < chosen

    return weights


class ParticipatingState(NamedTuple):
    """The common model of the last sync, this worker's start, and the inner state.

    A worker that is never stale started from the common model: then `start` is ().
    """

    common: PyTree
    start: PyTree
    strategy: PyTree


def participating(
    strategy: Strategy,
    schedule: Schedule,
    stale: bool = False,
    axis: Axis = WORKERS,
) -> Strategy:
    """Simulates that workers skip rounds: the others' mean is what counts.

    With w the schedule's weights at a sync, a worker hands in what it did since it
    started, weighted: for N workers, the common model c and its own start s,

        c + N w / Σw · (θ - s)

    in place of θ, so that a strategy's mean is the weighted mean over those who take
    part. Its gradients count N w / Σw times at each step. Where nobody takes part,
    nothing is sent: gradients are zero, and the round goes on to the next sync.

    Args:
        strategy: one that combines replicas or gradients by a mean, which no gossip
            does. In combinations, each member on its own.
        schedule: (step, workers) -> their weights, (workers,), at least 0, the same on
            all workers: 0 for one that skips. See `sampled`.
        stale: who skips keeps its own model and hands in all it did when it next takes
            part, as a slow worker does; else it starts from the new model with all.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the strategy's, c, and s if stale, shaped like params. Who
        skips sends zeros, and is counted as sending: a simulation.

    Raises:
        ValueError: no Strategy, one that both reduces and syncs or is `decided`, or a
            schedule that is no function.

    Source: McMahan et al., "Communication-efficient learning of deep networks from
    decentralized data", AISTATS 2017 (FedAvg).
    """
    check_strategy("participating", strategy)
    check_undecided("participating", strategy)
    if not callable(schedule):
        got = checks.shown(schedule)
        raise ValueError(f"participating: schedule must be a function, got {got}")
    return innermost(
        lambda member: _participating(member, schedule, stale, axis), strategy
    )


def _participating(strategy, schedule, stale, axis) -> Strategy:
    """`participating`, of a strategy that is no combination."""
    syncs = ever_syncs(strategy)
    if syncs and reduces(strategy):
        raise ValueError(
            "participating: a strategy that both reduces gradients and syncs replicas, "
            "as easgd and scaffold do, is more than a mean to be weighted"
        )

    def weights_at(step):
        workers = collectives.size(axis)
        weights = jnp.asarray(schedule(step, workers), float)
        if weights.shape != (workers,):
            raise ValueError(
                "participating: schedule must return a weight for each of the "
                f"{workers} workers, got shape {weights.shape}"
            )
        return weights

    def share(step):  # N w / Σw of this worker; 0 where nobody takes part
        weights = weights_at(step)
        total = jnp.sum(weights)
        mine = len(weights) * weights[collectives.index(axis)]
        return mine / jnp.where(total > 0, total, 1)

    def init(params):
        common = widen(params) if syncs else ()
        return ParticipatingState(
            common, common if stale else (), strategy.init(params)
        )

    def reduce(grads, replica, state, step):
        own = share(step)
        weighted = narrow(jax.tree.map(lambda g: own * g, widen(grads)), grads)
        grads, inner = strategy.reduce(weighted, replica, state.strategy, step)
        return grads, state._replace(strategy=inner)

    def sync(replica, state, step):
        if not any(changes_params(strategy, replica, state.strategy, step)):
            replica, inner = strategy.sync(replica, state.strategy, step)
            return replica, state._replace(strategy=inner)
        return lax.cond(
            jnp.sum(weights_at(step)) > 0,
            lambda: weighted_sync(replica, state, step),
            lambda: (replica, state),
        )

    def weighted_sync(replica, state, step):
        own, kept = share(step), replica.params
        handed_in = jax.tree.map(
            lambda c, s, x: c + own * (x - s),
            state.common,
            state.start if stale else state.common,
            replica.params,
        )
        replica, inner = strategy.sync(
            replica._replace(params=narrow(handed_in, kept)), state.strategy, step
        )
        common, start = widen(replica.params), ()
        if stale:

            def taken(new, old):
                return jax.tree.map(lambda n, o: jnp.where(own > 0, n, o), new, old)

            start = taken(common, state.start)
            replica = replica._replace(params=taken(replica.params, kept))
        return replica, ParticipatingState(common, start, inner)

    # A whole, as its state is: combinators must not look for members inside.
    landing = partial(lands, strategy)
    gated = combination(when(landing, Strategy(sync=sync))).call
    return strategy._replace(
        init=init,
        reduce=keep_grads if syncs else reduce,
        sync=gated if syncs else keep_replica,
        center=inner_center(strategy),
        acts=landing if syncs else None,
    )


class PacedState(NamedTuple):
    """The inner state, local steps since the last sync, and the params held by then."""

    strategy: PyTree
    done: jax.Array
    params: PyTree


def paced(
    strategy: Strategy, local_steps: Sequence[int], axis: Axis = WORKERS
) -> Strategy:
    """Simulates workers of different speeds: some take fewer local steps in a round.

    A worker that has done its steps keeps its params until the next sync. Its
    optimizer's state goes on all the same (compose `reset` where that matters).

    Args:
        strategy: any that syncs.
        local_steps: of each worker, how many it does between two syncs, at least 0.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the strategy's, a copy of params, and a count.

    Raises:
        ValueError: no Strategy, or counts that are no whole numbers; when its state is
            made, as many counts as there are no workers.
    """
    check_strategy("paced", strategy)
    if not ever_syncs(strategy):
        raise ValueError("paced: this strategy reduces gradients and never syncs")
    label = "paced: each of local_steps"
    quotas = [checks.whole(label, quota, least=0) for quota in local_steps]

    def init(params):
        workers = collectives.size(axis)
        if len(quotas) != workers:
            raise ValueError(
                f"paced: {len(quotas)} numbers of local steps for {workers} workers"
            )
        return PacedState(strategy.init(params), jnp.int32(0), params)

    def sync(replica, state, step):
        moves = state.done < jnp.array(quotas)[collectives.index(axis)]
        params = jax.tree.map(
            lambda new, old: jnp.where(moves, new, old), replica.params, state.params
        )
        replica, inner = strategy.sync(
            replica._replace(params=params), state.strategy, step
        )
        done = jnp.where(lands(strategy, step), 0, state.done + 1)
        return replica, PacedState(inner, done, replica.params)

    return strategy._replace(
        init=init,
        reduce=inner_reduce(strategy),
        sync=Combination(
            sync,
            (strategy,),
            lambda change: paced(change(strategy), quotas, axis),
            clocked=True,
        ),
        center=inner_center(strategy),
        acts=None,
    )
