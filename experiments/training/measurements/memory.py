"""Bytes that a device holds of the workers' state, with and without a mesh."""

import math
from typing import Any

import jax

from syncalgos import TrainState
from syncalgos.collectives import PyTree


def device_bytes(state: TrainState) -> dict[str, int]:
    """Returns the bytes on a device: params, opt_state and the strategy's sync.

    They include all lanes, and exclude temporary results.
    """
    return _by_part(state, lambda x: x.sharding.shard_shape(x.shape))


def bytes_without_mesh(state: TrainState) -> dict[str, int]:
    """Returns the same for as many lanes, if each worker had one device."""
    return _by_part(state, lambda x: (1, *x.shape[1:]))


def whole_axes(state: TrainState, axes: dict[str, int]) -> list[str]:
    """Returns the axes of several devices over which no leaf of params is sharded.

    Args:
        state: the state of the engine.
        axes: the sizes of the axes within a worker.
    """
    specs = [x.sharding.spec for x in jax.tree.leaves(state.replica.params) if axes]
    named = {name for spec in specs for name in jax.tree.leaves(tuple(spec))}
    return [name for name, size in axes.items() if size > 1 and name not in named]


def _by_part(state: TrainState, shape_of: Any) -> dict[str, int]:
    parts: dict[str, PyTree] = {
        "params": state.replica.params,
        "opt_state": state.replica.opt_state,
        "sync": state.sync,
    }

    def size(x: jax.Array) -> int:
        return math.prod(shape_of(x)) * x.dtype.itemsize

    return {name: sum(map(size, jax.tree.leaves(x))) for name, x in parts.items()}
