"""Checks and resolves users' shardings of a worker's model, leaf by leaf."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from syncalgos import checks
from syncalgos._engine.placement.layout import Layout
from syncalgos._engine.program import Own
from syncalgos.collectives import WORKERS, PyTree
from syncalgos.reducers._stacking.shards import Cut, Leaf, Sharding

_leaves = jax.tree_util.tree_leaves_with_path

Shardings = PyTree | Callable[[str, tuple[int, ...]], PartitionSpec]
"""The cut of each leaf of params over the axes within a worker: a tree of
PartitionSpecs, NamedShardings, or arrays with a sharding, for leaves or subtrees; or a
function: (a leaf's path, such as "blocks/up/w", its shape) -> PartitionSpec."""


class Asked:
    """The shardings that a trainer was asked for, and that of its last model.

    Raises:
        ValueError: shardings are given but no worker is a mesh.
    """

    def __init__(self, shardings: Shardings | None, layout: Layout):
        if shardings is not None and not layout.axes:
            raise ValueError("shardings name axes of a mesh: pass mesh, too")
        self._shardings, self._layout = shardings, layout
        self._last: Sharding | None = None

    def of_model(self, params: PyTree) -> Sharding | None:
        """Returns a plain model's sharding on a worker's devices; see `resolved`."""
        self._last = resolved(self._shardings, params, self._layout)
        return self._last

    def of_held(self, params: PyTree) -> Sharding | None:
        """Returns the sharding for the shapes of a model that is on the host."""
        if self._shardings is not None:
            return self.of_model(params)
        if self._last is None and self._layout.axes:
            raise ValueError(
                "from_host cannot tell how params are sharded: pass shardings in the "
                "Placement, or call init first"
            )
        return self._last


def resolved(
    shardings: Shardings | None, params: PyTree, layout: Layout
) -> Sharding | None:
    """Returns the sharding of params on a worker's devices; None without meshes.

    Args:
        shardings: the user's shardings; None takes those of the arrays.
        params: params of one plain model, arrays or their shapes.
        layout: the place of each worker.

    Raises:
        ValueError: a leaf cannot be cut this way; the message names it.
    """
    if not layout.axes:
        return None
    leaves = [(path, np.shape(x)) for path, x in _leaves(params)]
    if checks.is_function(shardings):
        specs = [shardings(checks.leaf_name(path), shape) for path, shape in leaves]
    else:
        specs = _of_tree(params if shardings is None else shardings, params)
    return _sharding(leaves, specs, layout)


def of_state(params: PyTree, layout: Layout) -> Sharding | None:
    """Returns the sharding of params (places, lanes, ...); None without meshes."""
    if not layout.axes:
        return None
    leaves = [(path, x.shape[2:]) for path, x in _leaves(params)]
    specs = [PartitionSpec(*_spec_of(x)[2:]) for x in jax.tree.leaves(params)]
    return _sharding(leaves, specs, layout)


def placed(own: Own, layout: Layout, sharding: Sharding | None, leading: int) -> Own:
    """Returns the sharding of each of the workers' arrays on their devices.

    Args:
        own: arrays or their shapes; their leading axes are worker axes.
        layout: the place of each worker.
        sharding: the sharding of params if workers are meshes.
        leading: the number of leading worker axes.
    """

    def of_leaf(path, x):
        spec = sharding.spec(path, x.shape[leading:]) if sharding else PartitionSpec()
        return layout.of_workers(spec)

    return jax.tree_util.tree_map_with_path(of_leaf, own)


def _sharding(leaves: list[Any], specs: list[Any], layout: Layout) -> Sharding:
    """Returns the sharding of leaves, pairs of a path and a shape, by their specs."""
    pairs = zip(leaves, specs, strict=True)
    found = [Leaf(at, x, _cut(at, x, spec, layout)) for (at, x), spec in pairs]
    # Longest paths first, because one path may be the end of another.
    found.sort(key=lambda leaf: -len(leaf.path))
    return Sharding(tuple(found), layout.batch_axes)


def _of_tree(tree: PyTree, params: PyTree) -> list[Any]:
    """Returns the PartitionSpec of each leaf of params."""

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec | NamedSharding)

    try:
        prefix = jax.tree.broadcast(tree, params, is_leaf=is_leaf)
    except ValueError as error:
        why = checks.unlike("shardings", params, tree, prefix=True)
        raise ValueError(f"shardings must be a tree like params: {why}") from error
    return [_spec_of(x) for x in jax.tree.leaves(prefix, is_leaf=is_leaf)]


def _spec_of(x: Any) -> Any:
    """Returns the spec of an array or a sharding; PartitionSpec() if it has none."""
    if x is None or isinstance(x, PartitionSpec):
        return x or PartitionSpec()
    sharding = x if isinstance(x, NamedSharding) else getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    is_array = isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    return PartitionSpec() if is_array else x


def _cut(path: Any, shape: tuple[int, ...], spec: Any, layout: Layout) -> Cut | None:
    """Returns the cut of a leaf; None if it is whole."""
    label = f"shardings of {checks.leaf_name(path)!r}"
    sizes = layout.inner
    if not isinstance(spec, PartitionSpec):
        raise ValueError(f"{label} must be a PartitionSpec, got {checks.shown(spec)}")
    if len(spec) > len(shape):
        raise ValueError(f"{label}: {spec} has more entries than the shape {shape}")
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    names = tuple(_names(label, entry, layout) for entry in entries)
    used = [axis for own in names for axis in own]
    if len(set(used)) != len(used):
        raise ValueError(f"{label}: {spec} names an axis twice")
    parts = []
    for dimension, (size, own) in enumerate(zip(shape, names, strict=True)):
        count = int(np.prod([sizes[axis] for axis in own]))
        if size % count:
            over = " × ".join(f"{axis} = {sizes[axis]}" for axis in own)
            raise ValueError(
                f"{label}: dimension {dimension} of shape {shape} does not divide over "
                f"{over}"
            )
        parts.append(count)
    cut = Cut(names, tuple(parts))
    return cut if cut.shards > 1 else None


def _names(label: str, entry: Any, layout: Layout) -> tuple[str, ...]:
    """Returns the axes that an entry of a PartitionSpec names."""
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    if not isinstance(names, tuple) or not all(isinstance(x, str) for x in names):
        raise ValueError(f"{label}: an entry must name axes, got {checks.shown(entry)}")
    for name in names:
        if name in WORKERS:
            raise ValueError(
                f"{label}: axis {name!r} is for the workers: use the axes within a "
                f"worker ({', '.join(layout.inner)})"
            )
        checks.one_of(f"axis in {label},", name, layout.inner)
    return names
