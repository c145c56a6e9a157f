"""Checks and resolves users' shardings of a worker's model, leaf by leaf."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from syncalgos import checks
from syncalgos._engine.placement.layout import Layout
from syncalgos._engine.program import WorkerState
from syncalgos.collectives import WORKERS, PyTree
from syncalgos.reducers._stacking.shards import Cut, Leaf, Sharding

_list_leaves = jax.tree_util.tree_leaves_with_path

Shardings = PyTree | Callable[[str, tuple[int, ...]], PartitionSpec]
"""The cut of each leaf of params over the axes within a worker: a tree of
PartitionSpecs, NamedShardings, or arrays with a sharding, for leaves or subtrees; or a
function: (a leaf's path, such as "blocks/up/w", its shape) -> PartitionSpec."""


class UserShardings:
    """The shardings that a trainer was asked for, and that of its last model.

    Raises:
        ValueError: shardings are given but no worker is a mesh.
    """

    def __init__(self, shardings: Shardings | None, layout: Layout):
        if shardings is not None and not layout.axes:
            raise ValueError("shardings name axes of a mesh: pass mesh, too")
        self._shardings = shardings
        self._layout = layout
        self._last_sharding: Sharding | None = None

    def resolve_for_model(self, params: PyTree) -> Sharding | None:
        """Returns a plain model's sharding on a worker's devices."""
        self._last_sharding = resolve_sharding(self._shardings, params, self._layout)
        return self._last_sharding

    def resolve_for_host(self, params: PyTree) -> Sharding | None:
        """Returns the sharding for the shapes of a model that is on the host."""
        if self._shardings is not None:
            return self.resolve_for_model(params)
        if self._last_sharding is None and self._layout.axes:
            raise ValueError(
                "from_host cannot tell how params are sharded: pass shardings in the "
                "Placement, or call init first"
            )
        return self._last_sharding


def resolve_sharding(
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
    leaves = [(path, np.shape(x)) for path, x in _list_leaves(params)]
    if checks.is_function(shardings):
        specs = [shardings(checks.leaf_name(path), shape) for path, shape in leaves]
    else:
        specs = _read_specs(params if shardings is None else shardings, params)
    return _make_sharding(leaves, specs, layout)


def read_sharding(params: PyTree, layout: Layout) -> Sharding | None:
    """Returns the sharding of params (places, lanes, ...); None without meshes."""
    if not layout.axes:
        return None
    leaves = [(path, x.shape[2:]) for path, x in _list_leaves(params)]
    specs = [PartitionSpec(*_spec_of(x)[2:]) for x in jax.tree.leaves(params)]
    return _make_sharding(leaves, specs, layout)


def make_shardings(
    worker_state: WorkerState, layout: Layout, sharding: Sharding | None, leading: int
) -> WorkerState:
    """Returns the sharding of each of the workers' arrays on their devices.

    Args:
        worker_state: arrays or their shapes; their leading axes are worker axes.
        layout: the place of each worker.
        sharding: the sharding of params if workers are meshes.
        leading: the number of leading worker axes.
    """

    def shard_leaf(path: Any, x: Any) -> jax.sharding.Sharding:
        spec = sharding.spec(path, x.shape[leading:]) if sharding else PartitionSpec()
        return layout.shard_workers(spec)

    return jax.tree_util.tree_map_with_path(shard_leaf, worker_state)


def _make_sharding(leaves: list[Any], specs: list[Any], layout: Layout) -> Sharding:
    """Returns the sharding of leaves, pairs of a path and a shape, by their specs."""
    cut_leaves = []
    for (path, shape), spec in zip(leaves, specs, strict=True):
        cut_leaves.append(Leaf(path, shape, _cut_leaf(path, shape, spec, layout)))
    # Longest paths first, because one path may be the end of another.
    cut_leaves.sort(key=lambda leaf: -len(leaf.path))
    return Sharding(tuple(cut_leaves), layout.batch_axes)


def _read_specs(tree: PyTree, params: PyTree) -> list[Any]:
    """Returns the PartitionSpec of each leaf of params."""

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec | NamedSharding)

    try:
        prefix = jax.tree.broadcast(tree, params, is_leaf=is_leaf)
    except ValueError as error:
        difference = checks.unlike("shardings", params, tree, prefix=True)
        raise ValueError(
            f"shardings must be a tree like params: {difference}"
        ) from error
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


def _cut_leaf(
    path: Any, shape: tuple[int, ...], spec: Any, layout: Layout
) -> Cut | None:
    """Returns the cut of a leaf; None if it is whole."""
    label = f"shardings of {checks.leaf_name(path)!r}"
    sizes = layout.inner
    if not isinstance(spec, PartitionSpec):
        raise ValueError(f"{label} must be a PartitionSpec, got {checks.shown(spec)}")
    if len(spec) > len(shape):
        raise ValueError(f"{label}: {spec} has more entries than the shape {shape}")
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    axis_names = tuple(_read_axis_names(label, entry, layout) for entry in entries)
    used_axes = list(chain.from_iterable(axis_names))
    if len(set(used_axes)) != len(used_axes):
        raise ValueError(f"{label}: {spec} names an axis twice")
    part_counts = []
    for dimension, (size, leaf_axes) in enumerate(zip(shape, axis_names, strict=True)):
        count = int(np.prod([sizes[axis] for axis in leaf_axes]))
        if size % count:
            axis_sizes = " × ".join(f"{axis} = {sizes[axis]}" for axis in leaf_axes)
            raise ValueError(
                f"{label}: dimension {dimension} of shape {shape} does not divide over "
                f"{axis_sizes}"
            )
        part_counts.append(count)
    cut = Cut(axis_names, tuple(part_counts))
    return cut if cut.shards > 1 else None


def _read_axis_names(label: str, entry: Any, layout: Layout) -> tuple[str, ...]:
    """Returns the axes that an entry of a PartitionSpec names."""
    names = entry
    if entry is None:
        names = ()
    elif isinstance(entry, str):
        names = (entry,)
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
