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
        axes: list[str] = []
        for names in self.names:
            axes += names
        return tuple(axes)

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

    def fits(self, shape: Sequence[int], full_shape: Sequence[int]) -> bool:
        """Whether an array can be cut in the same way as one of a full shape."""
        # An axis that is not cut may be shorter, as for some layers of a stack.
        if len(shape) != len(full_shape):
            return False
        sizes = zip(self.names, shape, full_shape, strict=False)
        return all(n == full_n for names, n, full_n in sizes if names)

    def shape(self, full_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a shard."""
        sizes = zip(full_shape, self.sizes, strict=True)
        return tuple(n // parts for n, parts in sizes)

    def split(self, x: jax.Array) -> jax.Array:
        """Lists the shards of an array: (shards, *shape of one)."""
        if self.is_mapped:
            return self.on_devices(lambda x: x[None], self.spec, self.of_shards)(x)
        return split_array(x, self.sizes)

    def join(self, shards: jax.Array) -> jax.Array:
        """Joins the shards of `split`."""
        if self.is_mapped:
            return self.on_devices(lambda x: x[0], self.of_shards, self.spec)(shards)
        return join_array(shards, self.sizes)

    def placed(self, shards: jax.Array) -> jax.Array:
        """Makes the compiler keep each shard of an array on its own device."""
        if not self.is_mapped:
            return shards
        return lax.with_sharding_constraint(shards, self.of_shards)

    def map(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Maps a function over shards: its arguments and results lead with them."""
        if not self.is_mapped:
            return jax.vmap(function)

        def map_on_device(*shards: PyTree) -> PyTree:
            result = function(*jax.tree.map(lambda x: x[0], shards))
            return jax.tree.map(lambda x: x[None], result)

        return self.on_devices(map_on_device, self.of_shards, self.of_shards)

    @property
    def is_mapped(self) -> bool:
        """Whether the compiler partitions over the mesh axes.

        While a program is only traced, there may be no mesh with these axes.
        """
        mesh = jax.sharding.get_abstract_mesh()
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        return bool(types) and all(types.get(x) == AxisType.Auto for x in self.axes)

    def on_devices(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Maps a function over a worker's devices, each of which sees its own shard."""
        # So XLA gathers nothing.
        options: Any = {"axis_names": {*self.axes}, "check_vma": False}
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, **options
        )


def split_array(x: jax.Array, counts: Sequence[int]) -> jax.Array:
    """Cuts an array into equal parts: (parts, *shape of one).

    Args:
        x: the array.
        counts: for each dimension, the number of parts, which divides its size.
    """
    dimensions = len(counts)
    split_shape: list[int] = []
    for size, count in zip(x.shape, counts, strict=True):
        split_shape += [count, size // count]
    x = x.reshape(split_shape)
    x = jnp.moveaxis(x, range(0, 2 * dimensions, 2), range(dimensions))
    return x.reshape(math.prod(counts), *x.shape[dimensions:])


def join_array(parts: jax.Array, counts: Sequence[int]) -> jax.Array:
    """Joins the parts of `split_array`."""
    shape = parts.shape[1:]
    dimensions = len(counts)
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

    def find_leaf(self, path: Path, shape: Sequence[int]) -> Leaf | None:
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
        like = self.find_leaf(path, shape)
        if like is not None:
            return PartitionSpec() if like.cut is None else like.cut.spec
        for leaf in self.leaves:
            cut = leaf.cut
            if cut is not None and shape[:1] == (cut.shards,) and leaf.ends(path):
                return cut.of_shards
        return PartitionSpec()

    def shard_of(self, tree: PyTree) -> PyTree:
        """Returns the shapes of one device's shards of a worker's arrays."""

        def take_shard(path: Path, x: Any) -> jax.ShapeDtypeStruct:
            like = self.find_leaf(path, x.shape)
            shape = x.shape
            if like is not None and like.cut is not None:
                shape = like.cut.shape(shape)
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return jax.tree_util.tree_map_with_path(take_shard, tree)


_SHARDING: Setting[Sharding | None] = Setting("sharding", None)


def known(sharding: Sharding | None) -> AbstractContextManager[None]:
    """Sets how a worker's arrays lie on its devices, for all code traced inside."""
    return _SHARDING.set_to(sharding)


def cuts(tree: PyTree) -> list[Cut | None]:
    """Returns how each leaf is cut; None means that it is whole."""
    sharding = _SHARDING.get()
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if sharding is None or sharding.are_shards:
        return [None] * len(leaves)
    leaf_cuts = []
    for path, x in leaves:
        like = sharding.find_leaf(path, jnp.shape(x))
        leaf_cuts.append(None if like is None else like.cut)
    return leaf_cuts


def whole_shapes(tree: PyTree) -> PyTree:
    """Returns the shapes of whole leaves, if the leaves are one device's shards.

    Fragments of a model depend on the sizes of its leaves, and must not depend on the
    mesh.
    """
    sharding = _SHARDING.get()
    if sharding is None or not sharding.are_shards:
        return tree

    def find_full_shape(path: Path, x: Any) -> Any:
        for leaf in sharding.leaves:
            if leaf.ends(path):
                return jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(x))
        return x

    return jax.tree_util.tree_map_with_path(find_full_shape, tree)


def gather_by_shard(tree: PyTree, axis: Axis) -> PyTree:
    """Gathers every worker's leaves, as `collectives.gather`, shard by shard."""
    gather = partial(collectives.gather, axis=axis)

    # XLA would first gather a leaf within the worker, and send all of it from each of
    # the worker's devices.
    def gather_leaf(x: jax.Array, cut: Cut | None) -> jax.Array:
        if cut is None or not cut.is_mapped:
            return gather(x)
        return cut.on_devices(gather, cut.spec, PartitionSpec(None, *cut.spec))(x)

    leaves, form = jax.tree.flatten(tree)
    return form.unflatten(map(gather_leaf, leaves, cuts(tree)))


def kept(tree: PyTree) -> PyTree:
    """Makes the compiler keep each array of a worker's state in its place."""
    sharding = _SHARDING.get()
    if sharding is None or not _has_mesh():
        return tree

    def keep_leaf(path: Path, x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return lax.with_sharding_constraint(x, sharding.spec(path, x.shape))

    return jax.tree_util.tree_map_with_path(keep_leaf, tree)


def spread_over_devices(batch: PyTree) -> PyTree:
    """Makes the compiler cut a worker's batch over its devices."""
    sharding = _SHARDING.get()
    if sharding is None or not sharding.batch_axes or not _has_mesh():
        return batch
    spec = PartitionSpec(sharding.batch_axes)
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, spec), batch)


def _has_mesh() -> bool:
    return not jax.sharding.get_abstract_mesh().empty
