"""The pieces of a leaf, each compressed as a leaf of its own.

Pieces are the layers that are stacked in a leaf, and the leaf's shards if a worker is
several devices: each device compresses its own shards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks, collectives
from syncalgos.collectives import Axis, PyTree
from syncalgos.reducers._stacking import shards

Layered = PyTree | checks.ByLeaf
"""The number of leading axes of each leaf that count layers: a tree of whole numbers
like params, in which one number may stand for a whole subtree; or a function of a
leaf's path, such as "blocks/up/w", and its shape. Each layer is compressed alone."""


def check_layered(label: str, layered: Layered) -> Layered:
    """Returns `layered`, or raises a ValueError that begins with a label."""
    if not checks.is_function(layered):
        for count in jax.tree.leaves(layered):
            checks.whole(label, count, least=0)
    return layered


def counts(layered: Layered, tree: PyTree) -> list[int]:
    """Returns the number of leading axes that count layers, leaf by leaf.

    Raises:
        ValueError: a tree of another form, no whole number, or more axes than a leaf
            has.
    """
    layer_axes = checks.labels("layered", layered, tree)
    leaves = jax.tree.leaves_with_path(tree)
    checked = []
    for count, (path, x) in zip(layer_axes, leaves, strict=True):
        name = checks.leaf_name(path)
        checked.append(checks.whole(f"layered of {name!r}", count, least=0))
        if count > jnp.ndim(x):
            raise ValueError(
                f"layered of {name!r} must be at most {jnp.ndim(x)}, its axes, got "
                f"{count}"
            )
    return checked


class Pieces(NamedTuple):
    """The pieces of a leaf.

    Attributes:
        layers: leading axes that count layers.
        cut: how the leaf is cut into shards; None: it is whole.
    """

    layers: int
    cut: shards.Cut | None = None

    def split(self, x: jax.Array) -> jax.Array:
        """Lists a leaf's shards, (shards, *layers, ...); a whole leaf is kept."""
        return x if self.cut is None else self.cut.split(x)

    def join(self, x: jax.Array) -> jax.Array:
        """Joins the shards of `split`."""
        return x if self.cut is None else self.cut.join(x)

    def map(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Applies a function of one piece to all pieces at once.

        Args:
            function: a function of arrays. Its collectives send all layers in one call.

        Returns:
            A function of arrays that lead with the pieces, as `split` returns them. Its
            results also lead with the pieces.
        """
        # vmap maps collectives too, so no reducer has batch axes of its own.
        for _ in range(self.layers):
            function = jax.vmap(function)
        return function if self.cut is None else self.cut.map(function)

    def leading(
        self, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the axes that lead a list of pieces, and the shape of a piece."""
        if self.cut is None:
            return shape[: self.layers], shape[self.layers :]
        shard = self.cut.shape(shape)
        return (self.cut.shards, *shard[: self.layers]), shard[self.layers :]


def pieces(layered: Layered, tree: PyTree) -> list[Pieces]:
    """Returns the pieces of each leaf; raises the ValueErrors of `counts`."""
    pairs = zip(counts(layered, tree), shards.cuts(tree), strict=True)
    return [Pieces(*pair) for pair in pairs]


def pieces_like(layered: Layered, tree: PyTree) -> PyTree:
    """Returns `pieces` as a tree of the same form."""
    return jax.tree.unflatten(jax.tree.structure(tree), pieces(layered, tree))


def means(
    leaf_pieces: list[Pieces], arrays: dict[int, jax.Array], axis: Axis
) -> dict[int, jax.Array]:
    """Returns the means over the workers of arrays that lead with pieces.

    Args:
        leaf_pieces: the pieces of each leaf. Whole leaves are sent together; each shard
            is sent by the device that holds it.
        arrays: arrays by the numbers of their leaves, in the order in which to send.
        axis: the mapped axis or axes over which the workers lie.
    """
    mean = partial(collectives.mean, axis=axis)
    whole_leaves = [i for i in arrays if leaf_pieces[i].cut is None]
    whole_means = mean([arrays[i] for i in whole_leaves])
    means_by_leaf = dict(zip(whole_leaves, whole_means, strict=True))
    for i, x in arrays.items():
        if i not in means_by_leaf:
            means_by_leaf[i] = leaf_pieces[i].map(mean)(x)
    return {i: means_by_leaf[i] for i in arrays}
