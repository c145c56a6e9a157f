"""Small strategies to compose; each acts on gradients or on one field of the replica.

Algorithms have no flags for optimizer state and batch statistics at a sync. Users
compose that: `every(chain(average(), reset(optimizer)), 16)`.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import _anchors, checks, collectives, reducers
from syncalgos._combinators import introspection, own_values, rules
from syncalgos._combinators.chain import chain
from syncalgos._combinators.participation import call_weighted, weight_like
from syncalgos._combinators.schedule import when
from syncalgos._dtypes import widen
from syncalgos._keys import is_key, is_untyped
from syncalgos._optax_states import AROUND, COUNTED, KEPT, check_mean
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.reducers import AnyReducer
from syncalgos.reducers._feedback import Ef21State, LateState
from syncalgos.reducers._reducer import check_optimizer
from syncalgos.reducers._resolve import resolve
from syncalgos.steps import ALWAYS, NEVER
from syncalgos.strategy import (
    MeanCenter,
    MeanOfGrads,
    Replica,
    Strategy,
    check_strategy,
    factory,
    keep_replica,
    take_step,
)


@factory
def reduce_with(transformation: AnyReducer, *, axis: Axis = WORKERS) -> Strategy:
    """Transforms the gradients at every step, before the inner optimizer.

    Args:
        transformation: an optax GradientTransformation, which may use collectives (see
            `syncalgos.reducers`); or its factory, which is called with `axis`; or the
            name of a reducer.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the transformation's, separate on each worker. A step sends
        what the transformation sends for gradients shaped like params.

    Raises:
        ValueError: the name is unknown, or the argument has the wrong type.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, reduce_with
        >>> model = np.ones(1000, np.float32)
        >>> for reducer in ("mean", "bf16", "int8"):
        ...     sent = communication(reduce_with(reducer), model, workers=2, steps=1)
        ...     print(reducer, sent.bytes_per_worker)
        mean 4000.0
        bf16 2000.0
        int8 1008.0
    """
    reducer = resolve("reduce_with", transformation, axis)

    def reduce(
        grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        return reducer.update(grads, state, replica.params, step=step)

    # Only a reducer that declares it is known to be a mean; one written by hand is not.
    is_mean = getattr(reducer, "mean_over", None) == WORKERS
    plain = Strategy(
        init=reducer.init,
        reduce=MeanOfGrads(reduce) if is_mean else reduce,
        center=MeanCenter(axis),
    )
    calls_late = getattr(reducer, "calls_late", 0)
    if not calls_late:
        return plain
    late = (introspection.Arrival(ALWAYS, rounds=calls_late),)
    sync = introspection.Combination(keep_replica, arrives=late)
    return plain._replace(sync=sync, acts=NEVER, late=calls_late)


@factory
def average(
    field: str = "params", reduce: AnyReducer = reducers.mean, *, axis: Axis = WORKERS
) -> Strategy:
    """Averages one field of the replica at each sync.

    Args:
        field: params, opt_state or buffers.
        reduce: a reducer, its factory, which is called with `axis`, or its name. With
            the mean, leaves that are not floats (counts, keys) keep each worker's
            value.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the reducer's, separate on each worker. A sync sends what the
        reducer sends for the field's leaves. The center is the mean of the replicas.
        Params keep their dtype: a mean in bfloat16 loses moves below half a unit in the
        last place. `outer_step(optax.sgd(1.0))` keeps them in float32.

    Raises:
        ValueError: the field is unknown, or a reducer with state is given for a field
            other than params. When the state is made: the reducer is `late` or `ef21`.
            When it is traced: an optimizer's state has no mean, as that of GaLore.

    Example:
        >>> import numpy as np
        >>> from syncalgos import average, communication, every
        >>> strategy = every(average(reduce="bf16"), 8)
        >>> model = np.ones(10, np.float32)
        >>> communication(strategy, model, workers=2, steps=16).bytes_per_worker
        40.0
    """
    fields = [name for name in Replica._fields if name != "loss"]
    checks.one_of("field of Replica", field, fields)
    reducer = resolve("average", reduce, axis)

    def init(params: PyTree) -> PyTree:
        state = reducer.init(params)
        if field != "params" and jax.tree.leaves(state):
            raise ValueError(
                f"average: a reducer with state cannot average {field}: use one "
                "without state, such as 'bf16'"
            )

        def begins_with_zeros(x: Any) -> bool:
            return isinstance(x, LateState | Ef21State)

        if any(
            map(begins_with_zeros, jax.tree.leaves(state, is_leaf=begins_with_zeros))
        ):
            raise ValueError("average: late and ef21 begin with 0: use outer_step")
        return state

    # The plain mean may take params whose moves `participating` has weighted. Others,
    # such as the largest entries, are no weighted mean of these.
    is_mean = getattr(reducer, "mean_over", None) is not None

    def update_field(
        replica: Replica, state: PyTree, step: Any, weigh: bool
    ) -> tuple[Replica, PyTree]:
        value = getattr(replica, field)
        if field == "opt_state":
            check_mean(value)

        def update(value: PyTree) -> tuple[PyTree, PyTree]:
            return reducer.update(value, state, replica.params, step=step)

        if weigh and collectives.takes_part() is not True:
            traced = own_values.trace(lambda x: update(x)[0], value, axis)
            if traced.mixes:
                raise rules.make_error("participating", "own state")
            value, state = call_weighted(update, value, traced)
        else:
            value, state = update(value)
        return replica._replace(**{field: value}), state

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
        if field == "params" and not is_mean and collectives.takes_part() is not True:
            raise rules.make_error("participating", "hidden average")
        return update_field(replica, state, step, weigh=field != "params")

    def weigh_sync(
        replica: Replica, state: PyTree, step: Any
    ) -> tuple[Replica, PyTree]:
        return update_field(replica, state, step, weigh=True)

    combination = introspection.Combination(sync)
    if field != "params":  # the center never changes
        combination = replace(combination, arrives=())
    elif not is_mean:
        combination = replace(combination, weigh=weigh_sync)
    return Strategy(init=init, sync=combination, center=MeanCenter(axis))


@factory
def reset(optimizer: optax.GradientTransformation) -> Strategy:
    """Resets the inner optimizer's state at each sync; schedules continue to count.

    Args:
        optimizer: the same inner optimizer as in the training loop. The reset keeps
            hyperparameters of `optax.inject_hyperparams`, the counts of schedules,
            gradients that `optax.MultiSteps` and `apply_every` have accumulated, random
            keys, and everything that optimizers with a self-tuned learning rate
            (prodigy, dadapt_adamw, dog, momo, …) have measured since the start.

    Returns:
        A Strategy without state, which sends nothing.

    Raises:
        ValueError: the argument is not an optimizer; or, when it is traced, opt_state
            belongs to another optimizer.

    Example:
        >>> import jax
        >>> import optax
        >>> from syncalgos import Replica, reset
        >>> optimizer = optax.sgd(0.1, momentum=0.9)
        >>> opt_state = optimizer.update(1.0, optimizer.init(0.0))[1]
        >>> strategy = reset(optimizer)
        >>> replica, _ = strategy.sync(Replica(0.0, opt_state), (), 0)
        >>> [float(x) for x in jax.tree.leaves((opt_state, replica.opt_state))]
        [1.0, 0.0]
    """

    check_optimizer("reset: optimizer", optimizer)

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
        opt_state = restart_opt_state(optimizer.init(replica.params), replica.opt_state)
        return replica._replace(opt_state=opt_state), state

    silent = introspection.Combination(sync, is_silent=True)
    return Strategy(sync=silent)


@factory
def at_syncs(strategy: Strategy, extra: Strategy) -> Strategy:
    """Applies `extra` after a strategy, at each of its syncs.

    `at_syncs(bmuf(16), reset(optimizer))` restarts momentum when the models agree.

    Args:
        strategy: any strategy that syncs. Its syncs are the steps at which it acts:
            `Strategy.acts`, declared by `every`, `when`, `after`, … or by hand. With a
            delay, they are the steps at which results arrive.
        extra: the strategy to apply at the syncs, such as `reset(optimizer)`,
            `average("opt_state")` or `average("buffers")`.

    Returns:
        A Strategy. State: the states of both.

    Raises:
        ValueError: an argument is not a Strategy, or `strategy` never syncs.

    Example:
        >>> import optax
        >>> from syncalgos import at_syncs, bmuf, reset
        >>> optimizer = optax.sgd(0.1, momentum=0.9)
        >>> strategy = at_syncs(bmuf(4), reset(optimizer))
        >>> [bool(strategy.acts(step)) for step in range(4)]
        [False, False, False, True]
    """
    for member in (strategy, extra):
        check_strategy("at_syncs", member)
    rules.check_combination("at_syncs", strategy)
    return _apply_after(strategy, extra)


def _apply_after(strategy: Strategy, extra: Strategy) -> Strategy:
    """`at_syncs`, without its checks."""
    # If the data decide, only the code inside the branch knows of a sync.
    if not rules.KINDS["decided by data"](strategy):
        extra = weight_like(extra, strategy)
        return chain(strategy, when(extra, introspection.landing_steps(strategy)))
    follow = introspection.combination(strategy).follow
    if follow is not None:
        return follow(extra)

    def apply_after_member(member: Strategy) -> Strategy:
        if not introspection.ever_syncs(member):
            return member
        return _apply_after(member, extra)

    return introspection.rebuild_members(strategy, apply_after_member)


def restart_opt_state(new: PyTree, old: PyTree) -> PyTree:
    """Replaces an optimizer state by a new one, except for the counts of schedules.

    Args:
        new: the optimizer's first state for the current params.
        old: the state to replace.

    Returns:
        `new`, with the states of `old` that continue: see `optax_states`, and keys.

    Raises:
        ValueError: the states belong to different optimizers or params.
    """
    shapes = [jax.tree.flatten(jax.tree.map(jnp.shape, x)) for x in (new, old)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "reset: opt_state was not made by this optimizer for these params: pass "
            "reset the same inner optimizer, use reset outside masked, and pass "
            "communication a Replica with its opt_state"
        )

    def restart_node(path: Any, new: Any, old: Any) -> Any:
        # Momentum restarts at a sync; a schedule must not. Nor must MultiSteps: with a
        # sync before each update, params would never move.
        name = type(new).__name__
        wrapper_field = AROUND.get(name)
        if wrapper_field:
            inner_state = restart_opt_state(
                getattr(new, wrapper_field), getattr(old, wrapper_field)
            )
            return old._replace(**{wrapper_field: inner_state})
        count_field = COUNTED.get(name)
        if count_field:
            return new._replace(**{count_field: getattr(old, count_field)})
        if name in KEPT or is_key(new) or is_untyped(path, new):
            return old
        return new

    def is_leaf(node: Any) -> bool:
        return type(node).__name__ in {*KEPT, *AROUND, *COUNTED}

    return jax.tree_util.tree_map_with_path(restart_node, new, old, is_leaf=is_leaf)


class OuterState(NamedTuple):
    """State of `outer_step`.

    Attributes:
        anchor: the params at the last sync, at least float32.
        outer: the outer optimizer's state.
        reducer: the reducer's state, separate on each worker.
    """

    anchor: PyTree
    outer: PyTree
    reducer: PyTree


@factory
def outer_step(
    outer: optax.GradientTransformation,
    reduce: AnyReducer = reducers.mean,
    *,
    axis: Axis = WORKERS,
) -> Strategy:
    """Takes a step of an outer optimizer on the pseudo-gradient at each sync.

    For the params θ of workers that started from the anchor:

        g ← reduce(anchor - θ);   anchor ← anchor + outer(g);   θ ← anchor

    Args:
        outer: any optax optimizer.
        reduce: the reducer that combines pseudo-gradients, and may compress them; or
            its factory, which is called with `axis`; or its name.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: the anchor and the outer optimizer's state, which are shaped
        like params, at least float32 and identical on all workers; and the reducer's
        state, separate on each worker. A sync sends what the reducer sends for leaves
        of at least float32. The center is the anchor. opt_state and buffers stay local.

    Raises:
        ValueError: `outer` is not an optax optimizer, or `reduce` is not a reducer.

    Example:
        >>> import numpy as np
        >>> import optax
        >>> from syncalgos import communication, every, outer_step
        >>> nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
        >>> diloco = every(outer_step(nesterov), 4)
        >>> adaptive = every(outer_step(optax.adam(0.1), reduce="int8"), 4)
        >>> model = np.ones(1000, np.float32)
        >>> for strategy in (diloco, adaptive):
        ...     sent = communication(strategy, model, workers=2, steps=8)
        ...     print(sent.bytes_per_worker)
        8000.0
        2016.0

    Source: Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 1
    (FedOpt); Douillard et al., "DiLoCo", 2023.
    """
    check_optimizer("outer_step: outer", outer)
    reducer = resolve("outer_step", reduce, axis)

    def init(params: PyTree) -> OuterState:
        wide_params = widen(params)
        return OuterState(
            wide_params, outer.init(wide_params), reducer.init(wide_params)
        )

    def sync(
        replica: Replica, state: OuterState, step: Any
    ) -> tuple[Replica, OuterState]:
        moves = _anchors.pseudo_gradient(state.anchor, replica.params)
        grads, reducer_state = reducer.update(
            moves, state.reducer, state.anchor, step=step
        )
        anchor, outer_state = take_step(
            "outer_step: outer", outer, grads, state.outer, state.anchor
        )
        new_state = OuterState(anchor, outer_state, reducer_state)
        return _anchors.restart(replica, anchor), new_state

    calls_late = getattr(reducer, "calls_late", 0)
    late_arrival = (introspection.Arrival(ALWAYS, rounds=calls_late),)
    return Strategy(
        init,
        sync=introspection.Combination(sync, arrives=late_arrival),
        center=_anchors.shipped("anchor"),
        axis=axis,
        late=calls_late,
    )
