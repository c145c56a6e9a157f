"""Simulated workers that skip rounds, or train at their own speed."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.combinators import introspection
from syncalgos.combinators.schedule import when
from syncalgos.dtypes import narrow, select, widen
from syncalgos.keys import common_key
from syncalgos.strategy import (
    Replica,
    Strategy,
    changes,
    check_strategy,
    keep_grads,
    keep_replica,
)

Schedule = Callable[[Any, int], Any]


def sampled(fraction: float, seed: int = 0, least: int = 1) -> Schedule:
    """Draws a share of the workers at each sync, as a schedule of `participating`.

    Args:
        fraction: the share, rounded to whole workers; above 0, at most 1.
        seed: the seed of the draws, the same on all workers.
        least: the fewest workers to draw, at least 1; with fewer workers, all.

    Returns:
        (step, workers) -> weights, (workers,) booleans, the same on all workers.

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
    """State of `participating`.

    Attributes:
        common: the common model c as of the last sync, at least float32.
        start: this worker's start s; () unless stale, as it then is c.
        strategy: the strategy's own.
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
    """Simulates workers that skip rounds, and combines the others by weighted means.

    With w the schedule's weights at a sync, N workers, the common model c and the
    worker's own start s, each worker hands in

        c + N w / Σw · (θ - s)

    in place of θ: the mean over all workers is then the weighted mean over those who
    take part, and so it is of opt_state and buffers where a member averages them.
    Gradients are multiplied by N w / Σw at each step. The engine weighs its means of
    metrics and of buffers, and the mean of replicas as a center, in the same way, by
    the weights of the round.

    Where nobody takes part, gradients are zero, and a round lasts to the next sync:
    nothing is sent at its end.

    Args:
        strategy: one that combines replicas or gradients by a mean. In a `chain`, every
            member is weighted on its own.
        schedule: (step, workers) -> their weights, (workers,), at least 0, the same on
            all workers: 0 for one that skips. See `sampled`.
        stale: whether a worker that skips keeps its model, and hands in all its steps
            when it next takes part, as a slow worker does. Otherwise it starts from the
            new model together with the others.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the strategy's, c, and s if stale, shaped like params. A
        worker that skips sends zeros, which count as sent: this is a simulation. With
        error feedback it goes on sending its residual.

    Raises:
        ValueError: no Strategy, one that both reduces and syncs, combines by no mean (a
            median, a vote, gossip, a momentum of a worker's own), is `decided` or must
            act at every step, as `async_diloco`; a schedule that is no function; when
            its state is made, weights that are negative or not finite.

    Source: McMahan et al., "Communication-efficient learning of deep networks from
    decentralized data", AISTATS 2017 (FedAvg).
    """
    check_strategy("participating", strategy)
    introspection.check_undecided("participating", strategy)
    introspection.check_not_steady("participating", strategy)
    if not callable(schedule):
        got = checks.shown(schedule)
        raise ValueError(f"participating: schedule must be a function, got {got}")
    return introspection.innermost(
        lambda member: _participating(member, schedule, stale, axis), strategy
    )


def _participating(strategy, schedule, stale, axis) -> Strategy:
    """`participating`, for a whole."""
    syncs = introspection.ever_syncs(strategy)
    if introspection.is_no_mean(strategy):
        raise ValueError(
            "participating: a strategy that combines by no mean, as a median, a vote, "
            "gossip or signum do, would count workers that skip as zeros"
        )
    if syncs and introspection.reduces(strategy):
        raise ValueError(
            "participating: a strategy that both reduces gradients and syncs replicas, "
            "as easgd and scaffold do, is more than a mean to be weighted"
        )

    def init(params):
        _check_weights(schedule, collectives.size(axis))
        common = widen(params) if syncs else ()
        return ParticipatingState(
            common, common if stale else (), strategy.init(params)
        )

    def reduce(grads, replica, state, step):
        weights = _weights(schedule, step, axis)
        grads = narrow(introspection.weighed(_share(weights, axis), grads), grads)
        grads, inner = strategy.reduce(grads, replica, state.strategy, step)
        return grads, state._replace(strategy=inner)

    def sync(replica, state, step):
        changed = changes(strategy, replica, state.strategy, step)
        if not (any(changed.params) or _sends(strategy, replica, state, step)):
            replica, inner = strategy.sync(replica, state.strategy, step)
            return replica, state._replace(strategy=inner)
        weights = _weights(schedule, step, axis)
        return lax.cond(
            jnp.sum(weights) > 0,
            lambda: weighted(replica, state, step, _share(weights, axis), changed),
            lambda: (replica, state),
        )

    weighted = partial(_weighted_sync, strategy, stale)
    # A whole, as its state is one: others must not take its members apart.
    landing = partial(introspection.lands, strategy)
    gated = introspection.combination(when(landing, Strategy(sync=sync))).call
    inner = introspection.weights(strategy)

    def of_round(step, workers):
        end = _end_of_round(landing, step) if syncs else step
        own = jnp.asarray(schedule(end, workers), float)
        return own if inner is None else own * inner(step, workers)

    return strategy._replace(
        init=init,
        reduce=keep_grads if syncs else reduce,
        sync=introspection.Combination(
            gated if syncs else keep_replica, weights=of_round
        ),
        center=introspection.inner_center(strategy),
        acts=landing if syncs else None,
    )


# Steps that are looked at together, and how often.
_AHEAD, _TIMES = 64, 256


def _end_of_round(landing: introspection.Steps, step: Any) -> Any:
    """The next step at which a sync lands; `step` if none does for long."""

    def hits(start):
        return jax.vmap(landing)(start + jnp.arange(_AHEAD))

    def is_missing(start):
        return ~jnp.any(hits(start)) & (start < step + _AHEAD * _TIMES)

    start = lax.while_loop(is_missing, lambda start: start + _AHEAD, jnp.asarray(step))
    found = hits(start)
    return jnp.where(jnp.any(found), start + jnp.argmax(found), step)


def _check_weights(schedule: Schedule, workers: int) -> None:
    """Refuses weights that are negative or not finite, at the first steps."""
    with jax.ensure_compile_time_eval():
        steps = jnp.arange(_AHEAD)
        weights = np.asarray(jax.vmap(lambda step: schedule(step, workers))(steps))
    bad = np.argwhere(~(np.isfinite(weights) & (weights >= 0)))
    if weights.shape == (_AHEAD, workers) and len(bad):
        step, worker = bad[0]
        raise ValueError(
            "participating: weights must be finite and at least 0, got "
            f"{weights[step, worker]} for worker {worker} at step {step}"
        )


def _weights(schedule: Schedule, step: Any, axis: Axis) -> jax.Array:
    """The schedule's weights at a step, (workers,)."""
    workers = collectives.size(axis)
    weights = jnp.asarray(schedule(step, workers), float)
    if weights.shape != (workers,):
        raise ValueError(
            "participating: schedule must return a weight for each of the "
            f"{workers} workers, got shape {weights.shape}"
        )
    return weights


def _share(weights: jax.Array, axis: Axis) -> jax.Array:
    """This worker's N w / Σw; 0 where nobody takes part."""
    total = jnp.sum(weights)
    mine = len(weights) * weights[collectives.index(axis)]
    return mine / jnp.where(total > 0, total, 1)


def _sends(strategy: Strategy, replica: Replica, state: Any, step: Any) -> bool:
    """Whether a sync may exchange anything, found by tracing it."""
    traced = jax.make_jaxpr(strategy.sync)(replica, state.strategy, step)
    return bool(traced.effects)  # of named axes


def _weighted_sync(strategy, stale, replica, state, step, own, changed):
    """A sync to which the worker hands in its share `own` of its moves."""
    kept, began = replica.params, state.start if stale else state.common
    # Moves are weighted, not models: so any strategy's mean becomes the weighted
    # one, also of moves that are compressed, and none needs to know of weights.
    moves = jax.tree.map(lambda s, x: x - s, began, kept)
    moved = introspection.weighed(own, moves)
    handed_in = Replica(
        narrow(jax.tree.map(jnp.add, state.common, moved), kept),
        *(
            _weighed_where(flags, own, tree)
            for flags, tree in zip(changed[1:], replica[1:], strict=True)
        ),
    )
    new, inner = strategy.sync(handed_in, state.strategy, step)
    common, start = state.common, state.start
    if any(changed.params):
        common = widen(new.params)
        start = select(own > 0, common, state.start) if stale else ()
    else:
        new = new._replace(params=kept)
    if stale:
        new = select(own > 0, new, replica)
    return new, ParticipatingState(common, start, inner)


def _weighed_where(flags: list[bool], own: jax.Array, tree: PyTree) -> PyTree:
    """Weighs the leaves that a sync changes: others pass through it."""
    leaves, form = jax.tree.flatten(tree)
    return form.unflatten(
        introspection.weighed(own, x) if flag else x
        for x, flag in zip(leaves, flags, strict=True)
    )


class PacedState(NamedTuple):
    """State of `paced`.

    Attributes:
        strategy: the strategy's own.
        done: local steps since the last sync, an int32 scalar.
        params: this worker's, as of the last step.
    """

    strategy: PyTree
    done: jax.Array
    params: PyTree


def paced(
    strategy: Strategy, local_steps: Sequence[int], axis: Axis = WORKERS
) -> Strategy:
    """Simulates workers of different speeds, by fewer local steps in a round.

    A worker that has done its steps keeps its params until the next sync. Its optimizer
    state goes on changing (compose `reset` where that matters).

    Args:
        strategy: any that syncs.
        local_steps: each worker's steps between two syncs, at least 0.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the strategy's, a copy of params, and a count.

    Raises:
        ValueError: no Strategy, one that never syncs, or counts that are no whole
            numbers; when its state is made, another number of counts than workers.
    """
    check_strategy("paced", strategy)
    if not introspection.ever_syncs(strategy):
        raise ValueError("paced: this strategy reduces gradients and never syncs")
    if not isinstance(local_steps, Iterable):
        got = checks.shown(local_steps)
        raise ValueError(f"paced: local_steps must be one for each worker, got {got}")
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
        held = replica._replace(params=select(moves, replica.params, state.params))
        replica, inner = strategy.sync(held, state.strategy, step)
        done = jnp.where(introspection.lands(strategy, step), 0, state.done + 1)
        return replica, PacedState(inner, done, replica.params)

    return strategy._replace(
        init=init,
        reduce=introspection.inner_reduce(strategy),
        sync=introspection.Combination(
            sync,
            (strategy,),
            lambda change: paced(change(strategy), quotas, axis),
            clocked=True,
        ),
        center=introspection.inner_center(strategy),
        acts=None,
    )
