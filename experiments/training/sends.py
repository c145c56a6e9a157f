"""The bytes of a run: sent by a worker at each step, and held by a device."""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from syncalgos.network import Sends

if TYPE_CHECKING:
    from syncalgos import TrainState


def each_device(sent: float | None, devices: int) -> float | int | None:
    """Returns the bytes that each of a worker's devices sent, if known."""
    if sent is None:
        return None
    each = sent / devices
    return int(each) if each.is_integer() else each


def to_json(sends: Sends) -> dict[str, Any]:
    """Returns the sends as JSON, with equal steps in a row as kind*length."""
    runs = (f"{kind}*{len(list(run))}" for kind, run in groupby(sends.steps))
    kinds = [{name: list(sent) for name, sent in kind.items()} for kind in sends.kinds]
    return {"kinds": kinds, "steps": " ".join(runs)}


def from_json(content: Mapping[str, Any]) -> Sends:
    """Returns the sends from JSON; the inverse of `to_json`."""
    runs = (map(int, run.split("*")) for run in content["steps"].split())
    kinds = [
        {name: (float(size), int(calls)) for name, (size, calls) in kind.items()}
        for kind in content["kinds"]
    ]
    return Sends(kinds, [kind for kind, length in runs for _ in range(length)])


def device_bytes(state: "TrainState", in_mesh: bool = True) -> dict[str, int]:
    """Returns the bytes on a device: params, opt_state and the strategy's sync.

    They include all lanes, and exclude temporary results.

    Args:
        state: the state of the engine.
        in_mesh: False counts as many lanes as if each worker had one device.
    """
    import jax

    def size(x: jax.Array) -> int:
        shape = x.sharding.shard_shape(x.shape) if in_mesh else x.shape[1:]
        return math.prod(shape) * x.dtype.itemsize

    own = state.replica
    parts = {"params": own.params, "opt_state": own.opt_state, "sync": state.sync}
    return {name: sum(map(size, jax.tree.leaves(x))) for name, x in parts.items()}


def whole_axes(state: "TrainState", axes: Mapping[str, int]) -> list[str]:
    """Returns the axes of several devices over which no leaf of params is sharded.

    Args:
        state: the state of the engine.
        axes: the sizes of the axes within a worker.
    """
    import jax

    specs = [x.sharding.spec for x in jax.tree.leaves(state.replica.params) if axes]
    named = {name for spec in specs for name in jax.tree.leaves(tuple(spec))}
    return [name for name, size in axes.items() if size > 1 and name not in named]
