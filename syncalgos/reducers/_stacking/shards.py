"""Shards of a worker's arrays, if a worker is several devices of a mesh.

The engine sets how the params are cut while it traces a program. Other arrays are
matched with them by path and shape: the momentum of a matrix is cut like the matrix.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from syncalgos import collectives
from syncalgos.collectives import Axis, PyTree
from syncalgos.collectives._axes import Setting

Path = tuple[Any, ...]
Parts = tuple[tuple[str, ...], ...]


class Cut(NamedTuple):
    """The cut of an array over the axes within a worker.

    Attributes:
        names: for each dimension, the axes over which it is cut; () if it is whole.
        sizes: for each dimension, the number of its parts.
    """

    names: Parts
    sizes: tuple[int, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that cut the array, those of the first dimension first."""
        return tuple(name for names in self.names for name in names)

    @property
    def shards(self) -> int:
        """The number of shards."""
        return math.prod(self.sizes)

    @property
    def spec(self) -> PartitionSpec:
        """The cut as a PartitionSpec."""
        return PartitionSpec(*(names or None for names in self.names))

    @property
    def of_shards(self) -> PartitionSpec:
        """The cut of an array that leads with the shards."""
        return PartitionSpec(self.axes)

    def fits(self, shape: Sequence[int], whole: Sequence[int]) -> bool:
        """Whether an array can be cut in the same way as one of shape `whole`."""
        # An axis that is not cut may be shorter, as for some layers of a stack.
        pairs = zip(self.names, shape, whole, strict=False)
        return len(shape) == len(whole) and all(n == m for cut, n, m in pairs if cut)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of a shard."""
        return tuple(n // parts for n, parts in zip(whole, self.sizes, strict=True))

    def split(self, x: jax.Array) -> jax.Array:
        """Lists the shards of an array: (shards, *shape of one)."""
        if self.is_mapped:
            return self.on_devices(lambda x: x[None], self.spec, self.of_shards)(x)
        return parted(x, self.sizes)

    def join(self, shards: jax.Array) -> jax.Array:
        """Joins the shards of `split`."""
        if self.is_mapped:
            return self.on_devices(lambda x: x[0], self.of_shards, self.spec)(shards)
        return joined(shards, self.sizes)

    def placed(self, shards: jax.Array) -> jax.Array:
        """Makes the compiler keep each shard of an array on its own device."""
        if not self.is_mapped:
            return shards
        return lax.with_sharding_constraint(shards, self.of_shards)

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Maps a function over shards: its arguments and results lead with them."""
        if not self.is_mapped:
            return jax.vmap(function)

        def on_device(*shards):
            one = function(*jax.tree.map(lambda x: x[0], shards))
            return jax.tree.map(lambda x: x[None], one)

        return self.on_devices(on_device, self.of_shards, self.of_shards)

    @property
    def is_mapped(self) -> bool:
        """Whether the compiler partitions over the mesh axes.

        While a program is only traced, there may be no mesh with these axes.
        """
        mesh = jax.sharding.get_abstract_mesh()
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        return bool(types) and all(types.get(x) == AxisType.Auto for x in self.axes)

    def on_devices(self, function: Callable, given: Any, made: Any) -> Callable:
        """Maps a function over a worker's devices, each of which sees its own shard."""
        # So XLA gathers nothing.
        along: Any = {"axis_names": {*self.axes}, "check_vma": False}
        return jax.shard_map(function, in_specs=given, out_specs=made, **along)


def parted(x: jax.Array, counts: Sequence[int]) -> jax.Array:
    """Cuts an array into equal parts: (parts, *shape of one).

    Args:
        x: the array.
        counts: for each dimension, the number of parts, which divides its size.
    """
    pairs, dimensions = zip(x.shape, counts, strict=True), len(counts)
    x = x.reshape([n for size, count in pairs for n in (count, size // count)])
    x = jnp.moveaxis(x, range(0, 2 * dimensions, 2), range(dimensions))
    return x.reshape(math.prod(counts), *x.shape[dimensions:])


def joined(parts: jax.Array, counts: Sequence[int]) -> jax.Array:
    """Joins the parts of `parted`."""
    shape, dimensions = parts.shape[1:], len(counts)
    x = parts.reshape(*counts, *shape)
    x = jnp.moveaxis(x, range(dimensions), range(0, 2 * dimensions, 2))
    return x.reshape([n * count for n, count in zip(shape, counts, strict=True)])


class Leaf(NamedTuple):
    """A leaf of params: its path, its shape, and how it is cut; None: it is whole."""

    path: Path
    shape: tuple[int, ...]
    cut: Cut | None

    def ends(self, path: Path) -> bool:
        """Whether a path ends in the leaf's path."""
        return path[max(0, len(path) - len(self.path)) :] == self.path


class Sharding(NamedTuple):
    """The places of a worker's arrays on its devices.

    Attributes:
        leaves: the leaves of params.
        batch_axes: the axes over which a worker's part of a batch is cut.
        are_shards: whether arrays are one device's shards, as when the ledger counts
            what a device sends.
    """

    leaves: tuple[Leaf, ...]
    batch_axes: tuple[str, ...] = ()
    are_shards: bool = False

    def of(self, path: Path, shape: Sequence[int]) -> Leaf | None:
        """The leaf of params that an array belongs to, by the end of its path."""
        for leaf in self.leaves:
            fits = leaf.cut is None or leaf.cut.fits(shape, leaf.shape)
            if fits and len(shape) == len(leaf.shape) and leaf.ends(path):
                return leaf
        return None

    def spec(self, path: Path, shape: Sequence[int]) -> PartitionSpec:
        """The place of an array of a worker's state on its devices.

        It is cut like its leaf of params. An array of another shape that leads with
        the leaf's shards is cut into these. Any other is whole on each device.
        """
        if (found := self.of(path, shape)) is not None:
            return PartitionSpec() if found.cut is None else found.cut.spec
        for leaf in self.leaves:
            cut = leaf.cut
            if cut is not None and shape[:1] == (cut.shards,) and leaf.ends(path):
                return cut.of_shards
        return PartitionSpec()

    def shard_of(self, tree: PyTree) -> PyTree:
        """Returns the shapes of one device's shards of a worker's arrays."""

        def leaf(path, x):
            found = self.of(path, x.shape)
            cut = None if found is None else found.cut
            shape = x.shape if cut is None else cut.shape(x.shape)
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return jax.tree_util.tree_map_with_path(leaf, tree)


_NOW: Setting[Sharding | None] = Setting("sharding", None)


def known(sharding: Sharding | None) -> AbstractContextManager[None]:
    """Sets how a worker's arrays lie on its devices, for all code traced inside."""
    return _NOW.set_to(sharding)


def cuts(tree: PyTree) -> list[Cut | None]:
    """Returns how each leaf is cut; None means that it is whole."""
    now, leaves = _NOW.get(), jax.tree_util.tree_leaves_with_path(tree)
    if now is None or now.are_shards:
        return [None] * len(leaves)
    found = [now.of(path, jnp.shape(x)) for path, x in leaves]
    return [None if leaf is None else leaf.cut for leaf in found]


def whole_shapes(tree: PyTree) -> PyTree:
    """Returns the shapes of whole leaves, if the leaves are one device's shards.

    Fragments of a model depend on the sizes of its leaves, and must not depend on the
    mesh.
    """
    now = _NOW.get()
    if now is None or not now.are_shards:
        return tree

    def whole(path, x):
        for leaf in now.leaves:
            if leaf.ends(path):
                return jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(x))
        return x

    return jax.tree_util.tree_map_with_path(whole, tree)


def gathered(tree: PyTree, axis: Axis) -> PyTree:
    """Gathers every worker's leaves, as `collectives.gather`, shard by shard."""
    gather = partial(collectives.gather, axis=axis)

    # XLA would first gather a leaf within the worker, and send all of it from each of
    # the worker's devices.
    def leaf(x, cut):
        if cut is None or not cut.is_mapped:
            return gather(x)
        return cut.on_devices(gather, cut.spec, PartitionSpec(None, *cut.spec))(x)

    leaves, form = jax.tree.flatten(tree)
    return form.unflatten(map(leaf, leaves, cuts(tree)))


def kept(tree: PyTree) -> PyTree:
    """Makes the compiler keep each array of a worker's state in its place."""
    now = _NOW.get()
    if now is None or not _has_mesh():
        return tree

    def leaf(path, x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return lax.with_sharding_constraint(x, now.spec(path, x.shape))

    return jax.tree_util.tree_map_with_path(leaf, tree)


def spread(batch: PyTree) -> PyTree:
    """Makes the compiler cut a worker's batch over its devices."""
    now = _NOW.get()
    if now is None or not now.batch_axes or not _has_mesh():
        return batch
    spec = PartitionSpec(now.batch_axes)
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, spec), batch)


def _has_mesh() -> bool:
    return not jax.sharding.get_abstract_mesh().empty
