"""Strategies for a part of the params."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos import checks
from syncalgos._combinators import introspection
from syncalgos.collectives import PyTree
from syncalgos.reducers._stacking import shards
from syncalgos.strategy import MeanCenter, Strategy, check_strategy, factory


@factory
def masked(strategy: Strategy, mask: PyTree | checks.ByLeaf) -> Strategy:
    """Applies a strategy to a part of the params and their gradients.

    The other leaves are neither sent nor changed. They may be personal layers, tables
    that are not trained in parallel, or the fragments of other members of a chain. The
    strategy sees all of opt_state and buffers.

    Args:
        strategy: the strategy to apply.
        mask: a tree like params, in which one value may stand for a whole subtree; or
            a function, (a leaf's path, such as "blocks/up/w", its shape) -> value, or
            params -> such a tree. True selects a leaf; a slice selects rows along its
            first axis, such as some layers of a stack.

    Returns:
        A Strategy. State: the strategy's, for its part of the params. The strategy's
        own center covers its part. For the other leaves the center is that of other
        members of a `chain`, or else the mean of the replicas.

    Raises:
        ValueError: the argument is not a Strategy; or, when the state is made, the mask
            is not a tree of booleans and slices for these params.

    Example:
        >>> import numpy as np
        >>> from syncalgos import bmuf, communication, masked
        >>> model = {"body": np.ones(90, np.float32), "head": np.ones(10, np.float32)}
        >>> personal = masked(bmuf(4), {"body": True, "head": False})
        >>> communication(personal, model, workers=2, steps=4).bytes_per_worker
        360.0
    """
    check_strategy("masked", strategy)

    # Other leaves become MaskedNode, a node without leaves, so that the strategy's
    # state does not hold them either.
    def part(tree, whole):
        leaves, form = jax.tree.flatten(tree)
        pairs = zip(_chosen(mask, whole), leaves, strict=True)
        return form.unflatten([_rows(x, own) for own, x in pairs])

    def merge(tree, whole):
        own, (leaves, form) = iter(jax.tree.leaves(tree)), jax.tree.flatten(whole)
        pairs = zip(_chosen(mask, whole), leaves, strict=True)
        return form.unflatten([_put(x, mine, own) for mine, x in pairs])

    def see(replica):
        return replica._replace(params=part(replica.params, replica.params))

    def reduce(grads, replica, state, step):
        mine = part(grads, replica.params)
        own, state = strategy.reduce(mine, see(replica), state, step)
        return merge(own, grads), state

    def sync(replica, state, step):
        own, state = strategy.sync(see(replica), state, step)
        return own._replace(params=merge(own.params, replica.params)), state

    def over(rest, params, state):
        own = part(params, params)
        center = introspection.center_over(strategy, part(rest, params), own, state)
        return merge(center, rest)

    return strategy._replace(
        init=lambda params: strategy.init(part(params, params)),
        reduce=introspection.reduce_like(reduce, strategy),
        sync=introspection.Combination(
            sync, (strategy,), partial(masked, mask=mask), partial=True
        ),
        # In a chain such centers are combined leaf by leaf.
        center=MeanCenter(introspection.axis_of(strategy), over)
        if introspection.has_center(strategy)
        else strategy.center,
        acts=introspection.acting_steps(strategy),
    )


def _chosen(mask: PyTree, params: PyTree) -> list[Any]:
    """For each leaf of params whether it is selected, or the slice of its rows."""
    leaves, cuts = checks.labels("masked: mask", mask, params), shards.cuts(params)
    for leaf, x, cut in zip(leaves, jax.tree.leaves(params), cuts, strict=True):
        if isinstance(leaf, slice) and not jnp.ndim(x):
            raise ValueError(
                f"masked: mask of a leaf without axes must be a boolean, got {leaf!r}"
            )
        if isinstance(leaf, slice) and cut is not None and cut.names[0]:
            raise ValueError(
                f"masked: mask selects rows of a leaf of shape {jnp.shape(x)}, but the "
                f"mesh shards its first axis over {', '.join(cut.names[0])}: select "
                "whole leaves, or shard another axis"
            )
        if not isinstance(leaf, bool | np.bool_ | slice):
            raise ValueError(f"masked: mask must hold booleans or slices, got {leaf!r}")
    return leaves


def _rows(x: jax.Array, mine: bool | slice) -> Any:
    """Takes the selected rows of a leaf."""
    # A slice keeps a leaf in one array. Split into rows, a stack of 12 layers would
    # take 12 times as many collectives.
    if isinstance(mine, slice):
        return x[mine]
    return x if mine else optax.MaskedNode()


def _put(x: jax.Array, mine: bool | slice, rows: Iterator[jax.Array]) -> jax.Array:
    """Replaces the selected rows of a leaf by the next item of `rows`."""
    if isinstance(mine, slice):
        return jnp.asarray(x).at[mine].set(next(rows))
    return next(rows) if mine else x
