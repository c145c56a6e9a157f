"""The outer loop of a strategy for a single worker, as an optax optimizer."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos._calls import suggest_arguments
from syncalgos._combinators.introspection import check_mapped, find_axis
from syncalgos._engine import inner_fit
from syncalgos._host_arrays import copy_host_arrays
from syncalgos._optax_states import GIVEN_LOSS
from syncalgos.collectives import Axis, PyTree
from syncalgos.collectives._axes import mapped_names
from syncalgos.reducers._reducer import check_optimizer
from syncalgos.strategy import (
    Replica,
    Strategy,
    apply_reduce,
    apply_sync,
    check_params,
    check_strategy,
    seeing,
    strong,
    take_step,
)


class OptimizerState(NamedTuple):
    """State of `as_optimizer`.

    Attributes:
        inner: the inner optimizer's state.
        sync: the strategy's state.
        step: the local step, an int32 scalar.
        seen: params without their arrays, as `init` saw them: a mask around the
            optimizer hides some.
    """

    inner: PyTree
    sync: PyTree
    step: jax.Array
    seen: PyTree


@suggest_arguments
def as_optimizer(
    strategy: Strategy, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Turns the outer loop of a strategy into an optimizer, for a single worker.

    A single worker has no others to average with, but an outer step along its own path
    may still help: Nesterov momentum every few steps of a fast inner optimizer
    (`diloco`), or an average of the path (`lookahead`). Any loop with an optax
    optimizer can use it:

        optimizer = as_optimizer(syncalgos.diloco(period=30), optax.adamw(1e-3))

    An update calls reduce, takes the inner step and calls sync. In a loop that averages
    gradients over devices by itself, every device takes the same outer step, and
    nothing more is sent.

    Args:
        strategy: the strategy, which sees one worker along its axis.
        inner: the inner optimizer; it gets the update's extra arguments. A strategy
            that `sees_loss` gets its loss from the extra argument `value`.

    Returns:
        A GradientTransformation that needs params. Its state holds the states of the
        inner optimizer and the strategy, and the local step. After a sync of diloco,
        slowmo, lookahead or classical bmuf, params are the center, the model to
        evaluate, up to rounding: they are a sum of params and updates in the params'
        dtype. Between syncs they are the worker's own. `center_of` returns the center
        at any step, for any strategy.

    Raises:
        ValueError: an argument that is not a Strategy or not an optimizer, an inner
            optimizer that a sync would break (schedule_free, sam, a line search, …),
            params that cannot be trained, or an update without params.

    Example:
        >>> import jax
        >>> import optax
        >>> from syncalgos import as_optimizer, lookahead
        >>> optimizer = as_optimizer(lookahead(2, slow_lr=0.5), optax.sgd(1.0))
        >>> params = jax.numpy.float32(0)
        >>> state = optimizer.init(params)
        >>> for _ in range(2):
        ...     updates, state = optimizer.update(-1.0 + 0 * params, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params)  # half of the way
        1.0

    Source: Kallusky et al., "SNOO: step-K Nesterov outer optimizer", 2025,
    arXiv:2510.15830, which is `diloco` of one worker; with a momentum of 0, it is
    Lookahead.
    """
    check_strategy("as_optimizer", strategy)
    check_mapped("as_optimizer", strategy)
    check_optimizer("as_optimizer: inner", inner)
    axis = find_axis(strategy)

    def init(params: PyTree) -> OptimizerState:
        check_params(params)
        params = copy_host_arrays("params", params)
        sync = call_alone(lambda: strong(strategy.init(params)), axis)
        opt_state = inner.init(params)
        step = jnp.zeros((), jnp.int32)
        inner_fit.check_form("as_optimizer: inner", opt_state, allowed_names=GIVEN_LOSS)
        inner_fit.check_clock("as_optimizer: inner", opt_state, strategy)
        inner_fit.check_rate("as_optimizer: inner", inner, strategy, params)
        return OptimizerState(opt_state, sync, step, _drop_arrays(params))

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, OptimizerState]:
        if params is None:
            raise ValueError("as_optimizer needs params: update(grads, state, params)")
        if strategy.sees_loss and "value" not in extra:
            raise ValueError(
                "as_optimizer: this strategy needs the loss: call update(grads, state, "
                "params, value=loss)"
            )

        updates = copy_host_arrays("updates", updates)
        params = copy_host_arrays("params", params)

        def step_and_sync() -> tuple[Replica, PyTree]:
            replica = seeing(strategy, Replica(params, state.inner), extra.get("value"))
            grads, sync = apply_reduce(
                strategy, updates, replica, state.sync, state.step
            )
            new_params, opt_state = take_step(
                "as_optimizer: inner", inner, grads, state.inner, params, **extra
            )
            replica = replica._replace(params=new_params, opt_state=opt_state)
            return apply_sync(strategy, replica, sync, state.step)

        replica, sync = call_alone(step_and_sync, axis)
        moves = jax.tree.map(jnp.subtract, replica.params, params)
        state = OptimizerState(replica.opt_state, sync, state.step + 1, state.seen)
        return moves, state

    return optax.GradientTransformationExtraArgs(init, update)


@suggest_arguments
def center_of(strategy: Strategy, state: Any, params: PyTree) -> PyTree:
    """Returns the center, the model to evaluate, of a loop with `as_optimizer`.

    Args:
        strategy: the strategy that `as_optimizer` was given.
        state: the optimizer's state; `optax.chain`, `masked`, `partition`, … may be
            around the optimizer.
        params: the params that the loop trains.

    Returns:
        A model, shaped like params: params themselves where the optimizer sees none.

    Raises:
        ValueError: `strategy` is not a Strategy, or the state does not hold the state
            of exactly one `as_optimizer` for leaves of these params.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import as_optimizer, center_of, ema, sync_sgd
        >>> averaged = ema(sync_sgd(), 0.5)
        >>> optimizer = as_optimizer(averaged, optax.sgd(1.0))
        >>> params = jnp.float32(0)
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(jnp.float32(-1), state, params)
        >>> params = optax.apply_updates(params, updates)
        >>> float(params), float(center_of(averaged, state, params))
        (1.0, 0.5)
    """
    check_strategy("center_of", strategy)

    def is_own(node: Any) -> bool:
        return isinstance(node, OptimizerState)

    nodes = jax.tree.leaves(state, is_leaf=is_own)
    own_states = [node for node in nodes if is_own(node)]
    if len(own_states) != 1:
        raise ValueError(
            "center_of: state must hold the state of exactly one as_optimizer, got "
            f"{len(own_states)} of them"
        )

    def is_leaf(node: Any) -> bool:
        return isinstance(node, optax.EmptyState | optax.MaskedNode)

    [own_state] = own_states

    def map_leaves(choose: Callable[..., Any], *trees: PyTree) -> PyTree:
        def choose_leaf(node: Any, *leaves: Any) -> Any:
            return choose(isinstance(node, optax.EmptyState), *leaves)

        return jax.tree.map(choose_leaf, own_state.seen, *trees, is_leaf=is_leaf)

    try:
        visible_params = map_leaves(
            lambda is_seen, x: x if is_seen else optax.MaskedNode(), params
        )
    except ValueError:
        visible_params = None
    seen_structure = jax.tree.structure(own_state.seen)
    if jax.tree.structure(_drop_arrays(visible_params)) != seen_structure:
        raise ValueError(
            "center_of: params are not those that the optimizer saw: pass the loop's "
            "params, and use no optax.flatten around as_optimizer"
        )
    center = call_alone(
        lambda: strategy.center(visible_params, own_state.sync), find_axis(strategy)
    )
    return map_leaves(lambda is_seen, x, y: y if is_seen else x, params, center)


def _drop_arrays(params: PyTree) -> PyTree:
    return jax.tree.map(lambda _: optax.EmptyState(), params)


def call_alone(function: Callable[[], PyTree], axis: Axis) -> PyTree:
    """Returns the function's result with a single worker along the axis."""
    for name in mapped_names(axis):
        function = partial(_call_along, name, function)
    return function()


def _call_along(name: str, function: Callable[[], PyTree]) -> PyTree:
    """Returns the function's result with an axis of size 1 mapped around it."""
    # Closed-over values are not batched, so that a sync's lax.cond stays one.
    results = jax.vmap(lambda _: function(), axis_name=name)(jnp.zeros(1))
    return jax.tree.map(lambda x: x[0], results)
