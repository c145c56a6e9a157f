"""Shardings of a model's arrays over the devices of a worker.

A rule gives each array a PartitionSpec by its path, its shape and the axes' sizes:

    MATRICES("0/w", (64, 128), {"fsdp": 2})  # PartitionSpec(None, "fsdp")
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec

FSDP = "fsdp"
TENSOR = "tensor"

Spec = Callable[[str, tuple[int, ...], Mapping[str, int]], PartitionSpec]


class Rule(NamedTuple):
    """The shardings of a model, and the axes that they are made for.

    Attributes:
        axes: the names of the axes.
        spec: (path such as "blocks/up/w", shape, sizes of a worker's axes) -> the spec.
    """

    axes: tuple[str, ...]
    spec: Spec

    def __call__(
        self, path: str, shape: tuple[int, ...], sizes: Mapping[str, int]
    ) -> PartitionSpec:
        """Returns the spec of one array."""
        return self.spec(path, shape, sizes)


def matrix(
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    layered: int = 0,
    tensor: int | None = None,
) -> PartitionSpec:
    """Shards a matrix, or stacked ones; what an axis does not divide stays whole.

    Args:
        shape: of the array.
        sizes: of a worker's axes. Of those here, "fsdp" takes the largest dimension
            that it divides and that "tensor" leaves.
        layered: leading dimensions that count layers.
        tensor: the dimension that "tensor" takes, from the end; None takes none.
    """
    axes: list[str | None] = [None] * len(shape)
    if tensor is not None and TENSOR in sizes:
        axes[tensor] = TENSOR
    if FSDP in sizes:
        # Not the layers' dimension: a scan reads one layer at a time, which would then
        # lie on a single device.
        free_dimensions = [i for i in range(layered, len(shape)) if axes[i] is None]
        divisible = [i for i in free_dimensions if shape[i] % sizes[FSDP] == 0]
        if divisible:
            axes[max(divisible, key=lambda i: shape[i])] = FSDP
    return PartitionSpec(*axes)


def _shard_matrix(
    path: str, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> PartitionSpec:
    return matrix(shape, sizes) if len(shape) == 2 else PartitionSpec()


MATRICES = Rule((FSDP,), _shard_matrix)
"""Shards each array of two dimensions; others, such as biases, stay whole."""


def shares() -> bool:
    """Whether the devices of a worker share its arrays, where this is traced."""
    return AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types


def gathered(x: jax.Array, tensor: int | None = None) -> jax.Array:
    """Returns an array as a step computes with it: whole, but for "tensor".

    Args:
        x: an array that a worker's devices share; any array without a mesh.
        tensor: the dimension that "tensor" takes; None takes none.
    """
    # By itself XLA gathers a worker's batch where that is less than the weights. And
    # where columns of a table and the numbers of its rows lie over one axis of two, its
    # partitioner aborts (jaxlib 0.10.2: Check failed in ExpandDeviceGroupsWithIota).
    if not shares():
        return x
    axes: list[str | None] = [None] * x.ndim
    if tensor is not None and TENSOR in jax.sharding.get_abstract_mesh().axis_names:
        axes[tensor] = TENSOR
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))
