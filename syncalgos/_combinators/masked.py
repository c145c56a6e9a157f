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
from syncalgos.strategy import (
    MeanCenter,
    Replica,
    Strategy,
    check_strategy,
    factory,
)


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
    def take_part(tree: PyTree, params: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        pairs = zip(_list_selections(mask, params), leaves, strict=True)
        return structure.unflatten(
            [_take_selected_rows(x, selection) for selection, x in pairs]
        )

    def merge(part: PyTree, tree: PyTree) -> PyTree:
        part_leaves = iter(jax.tree.leaves(part))
        leaves, structure = jax.tree.flatten(tree)
        pairs = zip(_list_selections(mask, tree), leaves, strict=True)
        leaves = [_put_rows(x, selection, part_leaves) for selection, x in pairs]
        return structure.unflatten(leaves)

    def mask_replica(replica: Replica) -> Replica:
        return replica._replace(params=take_part(replica.params, replica.params))

    def init(params: PyTree) -> PyTree:
        return strategy.init(take_part(params, params))

    def reduce(
        grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        masked_grads = take_part(grads, replica.params)
        masked_grads, state = strategy.reduce(
            masked_grads, mask_replica(replica), state, step
        )
        return merge(masked_grads, grads), state

    def sync(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
        new_replica, state = strategy.sync(mask_replica(replica), state, step)
        params = merge(new_replica.params, replica.params)
        return new_replica._replace(params=params), state

    def over(default_center: PyTree, params: PyTree, state: PyTree) -> PyTree:
        masked_params = take_part(params, params)
        masked_default = take_part(default_center, params)
        center = introspection.center_over(
            strategy, masked_default, masked_params, state
        )
        return merge(center, default_center)

    center = strategy.center
    if introspection.has_center(strategy):
        # In a chain such centers are combined leaf by leaf.
        center = MeanCenter(introspection.find_axis(strategy), over)
    return strategy._replace(
        init=init,
        reduce=introspection.reduce_like(reduce, strategy),
        sync=introspection.Combination(
            sync, (strategy,), partial(masked, mask=mask), partial=True
        ),
        center=center,
        acts=introspection.acting_steps(strategy),
    )


def _list_selections(mask: PyTree, params: PyTree) -> list[Any]:
    """For each leaf of params whether it is selected, or the slice of its rows."""
    selections = checks.labels("masked: mask", mask, params)
    cuts = shards.cuts(params)
    for selection, x, cut in zip(
        selections, jax.tree.leaves(params), cuts, strict=True
    ):
        if isinstance(selection, slice) and not jnp.ndim(x):
            raise ValueError(
                "masked: mask of a leaf without axes must be a boolean, got "
                f"{selection!r}"
            )
        if isinstance(selection, slice) and cut is not None and cut.names[0]:
            raise ValueError(
                f"masked: mask selects rows of a leaf of shape {jnp.shape(x)}, but the "
                f"mesh shards its first axis over {', '.join(cut.names[0])}: select "
                "whole leaves, or shard another axis"
            )
        if not isinstance(selection, bool | np.bool_ | slice):
            raise ValueError(
                f"masked: mask must hold booleans or slices, got {selection!r}"
            )
    return selections


def _take_selected_rows(x: jax.Array, selection: bool | slice) -> Any:
    """Takes the selected rows of a leaf."""
    # A slice keeps a leaf in one array. Split into rows, a stack of 12 layers would
    # take 12 times as many collectives.
    if isinstance(selection, slice):
        return x[selection]
    return x if selection else optax.MaskedNode()


def _put_rows(
    x: jax.Array, selection: bool | slice, rows: Iterator[jax.Array]
) -> jax.Array:
    """Replaces the selected rows of a leaf by the next item of `rows`."""
    if isinstance(selection, slice):
        return jnp.asarray(x).at[selection].set(next(rows))
    return next(rows) if selection else x
