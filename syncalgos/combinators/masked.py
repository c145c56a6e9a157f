"""Strategies for a part of the parameters."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos import checks
from syncalgos.collectives import PyTree
from syncalgos.combinators import introspection
from syncalgos.former_calls import accepts_former, axis_of_member
from syncalgos.reducers.stacking import shards
from syncalgos.strategy import MeanCenter, Strategy, check_strategy, keep_grads


@accepts_former("strategy mask axis", changed=axis_of_member)
def masked(strategy: Strategy, mask: PyTree | Callable[[PyTree], PyTree]) -> Strategy:
    """Applies a strategy to a part of the params and their gradients.

    The other leaves are neither sent nor changed: personal layers, tables that are not
    trained in parallel, the fragments of other members of a chain. The strategy sees
    all of opt_state and buffers.

    Args:
        strategy: what to apply.
        mask: True for the leaves it applies to, or a slice of the rows along the first
            axis, such as some of a stack of layers: a tree like params, or one for
            whole subtrees; or params -> such a tree.

    Returns:
        A Strategy. State: the strategy's, for its part of the params. Its own center
        holds for its part; the center of the other leaves is that of other members in a
        `chain`, or else their mean.

    Raises:
        ValueError: no Strategy; when its state is made, a mask that is no tree of
            booleans and slices for these params.

    Example:
        >>> import numpy as np
        >>> from syncalgos import bmuf, communication, masked
        >>> model = {"body": np.ones(90, np.float32), "head": np.ones(10, np.float32)}
        >>> personal = masked(bmuf(4), {"body": True, "head": False})
        >>> communication(personal, model, workers=2, steps=4).bytes_per_worker
        360.0
    """
    check_strategy("masked", strategy)

    # Other leaves become nodes without leaves, MaskedNode: what the strategy keeps of
    # its params then has none of them either.
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
        own, state = strategy.reduce(
            part(grads, replica.params), see(replica), state, step
        )
        return merge(own, grads), state

    def sync(replica, state, step):
        own, state = strategy.sync(see(replica), state, step)
        return own._replace(params=merge(own.params, replica.params)), state

    def over(rest, params, state):
        own = part(params, params)
        rest_of_own = part(rest, params)
        center = introspection.center_over(strategy, rest_of_own, own, state)
        return merge(center, rest)

    return strategy._replace(
        init=lambda params: strategy.init(part(params, params)),
        reduce=reduce if introspection.reduces(strategy) else keep_grads,
        sync=introspection.Combination(
            sync, (strategy,), lambda change: masked(change(strategy), mask)
        ),
        # In a chain such centers are laid over one another, leaf by leaf.
        center=MeanCenter(introspection.axis_of(strategy), over)
        if introspection.has_center(strategy)
        else strategy.center,
        acts=introspection.acting_steps(strategy),
    )


def _chosen(mask: PyTree, params: PyTree) -> list[Any]:
    """Whether each leaf of params is masked, or the slice of its rows that are."""
    leaves, cuts = checks.labels("masked: mask", mask, params), shards.cuts(params)
    for leaf, x, cut in zip(leaves, jax.tree.leaves(params), cuts, strict=True):
        if isinstance(leaf, slice) and not jnp.ndim(x):
            raise ValueError(
                f"masked: a leaf without axes takes True or False, got {leaf!r}"
            )
        if isinstance(leaf, slice) and cut is not None and cut.names[0]:
            raise ValueError(
                f"masked: the mask takes rows of a leaf of shape {jnp.shape(x)}, whose "
                f"first axis the mesh cuts over {', '.join(cut.names[0])}: take whole "
                "leaves, or cut another axis"
            )
        if not isinstance(leaf, bool | np.bool_ | slice):
            raise ValueError(
                f"masked: mask must hold booleans, got {leaf!r} (or slices)"
            )
    return leaves


def _rows(x: jax.Array, mine: bool | slice) -> Any:
    """Takes the masked rows of a leaf."""
    # A slice keeps a leaf one array. Taken apart into its rows, a stack of 12 layers
    # would be 12 times as many collectives.
    if isinstance(mine, slice):
        return x[mine]
    return x if mine else optax.MaskedNode()


def _put(x: jax.Array, mine: bool | slice, rows: Iterator[jax.Array]) -> jax.Array:
    """Replaces the masked rows of a leaf by the next of `rows`."""
    if isinstance(mine, slice):
        return jnp.asarray(x).at[mine].set(next(rows))
    return next(rows) if mine else x
