"""Layers that are stacked in one leaf: each counts as a leaf of its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos.collectives import PyTree

Stacked = PyTree | Callable[[str, tuple[int, ...]], int]
"""How many leading axes of each leaf count layers: a tree of whole numbers like params,
or one for whole subtrees; or a function of a leaf's path, such as "blocks/up/w", and
its shape. What a layer of such a leaf is compressed to depends on that layer alone."""


def check(label: str, stacked: Stacked) -> Stacked:
    """Returns what says which leaves are stacked, or raises a ValueError."""
    if not callable(stacked):
        for count in jax.tree.leaves(stacked):
            checks.whole(label, count, least=0)
    return stacked


def counts(stacked: Stacked, tree: PyTree) -> list[int]:
    """How many leading axes of each leaf of a tree count layers.

    Raises:
        ValueError: a tree of another form, no whole number, or more axes than a leaf
            has.
    """
    leaves = jax.tree.leaves_with_path(tree)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves]
    shapes = [jnp.shape(x) for _, x in leaves]
    if callable(stacked):
        found: list[Any] = [stacked(*x) for x in zip(names, shapes, strict=True)]
    else:
        found = checks.labels("stacked", stacked, tree)
    labels = [f"stacked of {name!r}" for name in names]
    result = [checks.whole(*each, least=0) for each in zip(labels, found, strict=True)]
    for label, shape, count in zip(labels, shapes, result, strict=True):
        if count > len(shape):
            raise ValueError(
                f"{label} must be at most its {len(shape)} axes, got {count}"
            )
    return result


def counts_like(stacked: Stacked, tree: PyTree) -> PyTree:
    """`counts` as a tree of that form."""
    return jax.tree.unflatten(jax.tree.structure(tree), counts(stacked, tree))


def layerwise(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The function applied to each layer of its arguments, all at once.

    Args:
        function: of arrays, which may use collectives: they are one for all layers.
        count: leading axes of each argument, and of each result, that count layers.
    """
    for _ in range(count):
        function = jax.vmap(function)
    return function
