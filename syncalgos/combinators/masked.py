"""A strategy for a part of the parameters."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos import checks
from syncalgos.collectives import WORKERS, Axis, PyTree
from syncalgos.combinators.introspection import (
    Combination,
    acting_steps,
    center_over,
    has_center,
    reduces,
)
from syncalgos.strategy import MeanCenter, Strategy, check_strategy, keep_grads


def masked(
    strategy: Strategy,
    mask: PyTree | Callable[[PyTree], PyTree],
    axis: Axis = WORKERS,
) -> Strategy:
    """Applies a strategy to a part of the params and their gradients.

    The other leaves are neither sent nor changed: personal layers, tables that are not
    trained in parallel, the fragments of other members of a chain. opt_state and
    buffers are seen whole.

    Args:
        strategy: what to apply.
        mask: True for the leaves it applies to, or a slice of the rows along the first
            axis, such as some of a stack of layers: a tree like params, or one for
            whole subtrees; or params -> such a tree.
        axis: over which the center of the other leaves is averaged.

    Returns:
        A Strategy. State: that of the strategy for its part of the params. A center of
        its own holds for its part; in a `chain` the other leaves have that of the other
        members, else their mean.

    Raises:
        ValueError: no Strategy; when its state is made, a mask that is no tree of
            booleans and slices for these params.
    """
    check_strategy("masked", strategy)

    def chosen(params):
        leaves = checks.labels("masked: mask", mask, params)
        for leaf, x in zip(leaves, jax.tree.leaves(params), strict=True):
            if isinstance(leaf, slice) and not jnp.ndim(x):
                raise ValueError(
                    f"masked: a leaf without axes takes True or False, got {leaf!r}"
                )
            if not isinstance(leaf, bool | np.bool_ | slice):
                raise ValueError(
                    f"masked: mask must hold booleans, got {leaf!r} (or slices)"
                )
        return leaves

    def part(tree, whole):  # the other leaves leave no trace in the tree
        leaves, form = jax.tree.flatten(tree)
        pairs = zip(chosen(whole), leaves, strict=True)
        return form.unflatten([_rows(x, own) for own, x in pairs])

    def merge(tree, whole):
        own, (leaves, form) = iter(jax.tree.leaves(tree)), jax.tree.flatten(whole)
        pairs = zip(chosen(whole), leaves, strict=True)
        return form.unflatten([_put(x, mine, own) for mine, x in pairs])

    def see(replica):
        return replica._replace(params=part(replica.params, replica.params))

    def reduce(grads, replica, state, step):
        own, state = strategy.reduce(
            part(grads, replica.params), see(replica), state, step
        )
        return merge(own, grads), state

    def sync(replica, state, step):
        own, state = strategy.sync(see(replica), state, step)
        return own._replace(params=merge(own.params, replica.params)), state

    def over(rest, params, state):
        own = part(params, params)
        return merge(center_over(strategy, part(rest, params), own, state), rest)

    return Strategy(
        init=lambda params: strategy.init(part(params, params)),
        reduce=reduce if reduces(strategy) else keep_grads,
        sync=Combination(
            sync, (strategy,), lambda change: masked(change(strategy), mask, axis)
        ),
        # Chained, such centers are laid over one another, leaf by leaf.
        center=MeanCenter(axis, over) if has_center(strategy) else strategy.center,
        acts=acting_steps(strategy),
    )


def _rows(x: jax.Array, mine: bool | slice) -> Any:
    """The masked rows of a leaf."""
    if isinstance(mine, slice):
        return x[mine]
    return x if mine else optax.MaskedNode()


def _put(x: jax.Array, mine: bool | slice, rows: Iterator[jax.Array]) -> jax.Array:
    """The leaf with its masked rows replaced by the next."""
    if isinstance(mine, slice):
        return jnp.asarray(x).at[mine].set(next(rows))
    return next(rows) if mine else x
