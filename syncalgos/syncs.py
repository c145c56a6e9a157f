"""Small strategies to compose: what happens to gradients or a field of the replica.

What to do with optimizer state or batch statistics at a sync is a choice that the user
composes, `every(16, chain(average(), reset(optimizer)))`, not a flag of each algorithm.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks, reducers
from syncalgos.base import MeanCenter, Replica, Strategy
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.reducers import Reducer


def reduce_with(
    transformation: Reducer | Callable[..., Reducer], axis: Axis = WORKERS
) -> Strategy:
    """Transforms the gradients of every step, before the inner optimizer.

    Args:
        transformation: an optax GradientTransformation, which may use collectives (see
            `syncalgos.reducers`), or its factory, which is then called with `axis`.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the transformation's, each worker's own.
    """
    reducer = reducers.resolve("reduce_with", transformation, axis)

    def reduce(grads, replica, state, step):
        return reducer.update(grads, state, replica.params)

    return Strategy(init=reducer.init, reduce=reduce, center=MeanCenter(axis))


def average(
    field: str = "params",
    reduce: Reducer | Callable[..., Reducer] = reducers.mean,
    axis: Axis = WORKERS,
) -> Strategy:
    """Averages one field of the replica at each sync.

    Args:
        field: params, opt_state or buffers.
        reduce: a reducer, or its factory, which is then called with `axis`. Under the
            mean, leaves that are no floats (counts, keys) keep each worker's value.
        axis: the mapped axis or axes over which the workers lie.

    Raises:
        ValueError: an unknown field, or a reducer with state on another than params.
    """
    checks.one_of("field of Replica", field, Replica._fields)
    reducer = reducers.resolve("average", reduce, axis)

    def init(params):
        state = reducer.init(params)
        if field != "params" and jax.tree.leaves(state):
            raise ValueError(f"average: a reducer with state cannot average {field}")
        return state

    def sync(replica, state, step):
        value, state = reducer.update(getattr(replica, field), state, replica.params)
        return replica._replace(**{field: value}), state

    return Strategy(init=init, sync=sync, center=MeanCenter(axis))


def reset(optimizer: optax.GradientTransformation) -> Strategy:
    """Starts the inner optimizer's state anew at each sync; schedules count on.

    Args:
        optimizer: the inner optimizer, as the training loop has it. Hyperparameters of
            `optax.inject_hyperparams` are kept, as is the count of its schedules.
    """

    reducers.check_optimizer("reset: optimizer", optimizer)

    def sync(replica, state, step):
        opt_state = _restart(optimizer.init(replica.params), replica.opt_state)
        return replica._replace(opt_state=opt_state), state

    return Strategy(sync=sync)


_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


def _restart(new: PyTree, old: PyTree) -> PyTree:
    """The new optimizer state, but for what counts a schedule's steps."""

    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            "reset: the replica's opt_state is not of this optimizer; give reset the "
            "very inner optimizer, and communication a Replica with its opt_state"
        )

    def restart(new, old):
        if isinstance(new, optax.ScaleByScheduleState):
            return old
        if isinstance(new, _INJECTED):
            return old._replace(inner_state=_restart(new.inner_state, old.inner_state))
        return new

    def is_leaf(node):
        return isinstance(node, (optax.ScaleByScheduleState, *_INJECTED))

    return jax.tree.map(restart, new, old, is_leaf=is_leaf)


class OuterState(NamedTuple):
    """State of `outer_step`."""

    anchor: PyTree
    outer: PyTree
    reducer: PyTree


def outer_step(
    outer: optax.GradientTransformation,
    reduce: Reducer | Callable[..., Reducer] = reducers.mean,
    axis: Axis = WORKERS,
) -> Strategy:
    """One step of an outer optimizer on the pseudo-gradient, at each sync.

    For workers' params θ that started from the anchor:

        g ← reduce(anchor - θ);   anchor ← anchor + outer(g);   θ ← anchor

    Args:
        outer: any optax optimizer.
        reduce: how the pseudo-gradients are combined: a reducer (it may compress them),
            or its factory, which is then called with `axis`.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the anchor and the outer optimizer's state, shaped like
        params and equal on all workers, and the reducer's, each worker's own. A sync
        sends what the reducer sends. The center is the anchor. opt_state and buffers
        stay local.

    Source: Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 1
    (FedOpt); Douillard et al., "DiLoCo", 2023.
    """
    reducers.check_optimizer("outer_step: outer", outer)
    reducer = reducers.resolve("outer_step", reduce, axis)

    def init(params):
        return OuterState(params, outer.init(params), reducer.init(params))

    def sync(replica, state, step):
        pseudo_gradient = jax.tree.map(jnp.subtract, state.anchor, replica.params)
        grads, reducer_state = reducer.update(
            pseudo_gradient, state.reducer, replica.params
        )
        updates, outer_state = outer.update(grads, state.outer, state.anchor)
        anchor = optax.apply_updates(state.anchor, updates)
        return (
            replica._replace(params=anchor),
            OuterState(anchor, outer_state, reducer_state),
        )

    return Strategy(init=init, sync=sync, center=lambda params, state: state.anchor)
