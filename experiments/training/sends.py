"""The bytes of a run: sent by a worker at each step, and held by a device."""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from syncalgos.network import Sends

if TYPE_CHECKING:
    from syncalgos import TrainState


def bytes_per_device(worker_bytes: float | None, devices: int) -> float | int | None:
    """Returns the bytes that each of a worker's devices sent, if known."""
    if worker_bytes is None:
        return None
    share = worker_bytes / devices
    return int(share) if share.is_integer() else share


def to_json(sends: Sends) -> dict[str, Any]:
    """Returns the sends as JSON, with equal steps in a row as kind*length."""
    runs = (f"{kind}*{len(list(run))}" for kind, run in groupby(sends.steps))
    kinds = []
    for kind in sends.kinds:
        kinds.append({name: list(counts) for name, counts in kind.items()})
    return {"kinds": kinds, "steps": " ".join(runs)}


def from_json(content: Mapping[str, Any]) -> Sends:
    """Returns the sends from JSON; the inverse of `to_json`."""
    kinds = []
    for kind in content["kinds"]:
        counts = {}
        for name, (size, calls) in kind.items():
            counts[name] = (float(size), int(calls))
        kinds.append(counts)
    steps: list[int] = []
    for run in content["steps"].split():
        kind, length = map(int, run.split("*"))
        steps += [kind] * length
    return Sends(kinds, steps)


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

    parts = {
        "params": state.replica.params,
        "opt_state": state.replica.opt_state,
        "sync": state.sync,
    }
    return {name: sum(map(size, jax.tree.leaves(x))) for name, x in parts.items()}


def whole_axes(state: "TrainState", axes: Mapping[str, int]) -> list[str]:
    """Returns the axes of several devices over which no leaf of params is sharded.

    Args:
        state: the state of the engine.
        axes: the sizes of the axes within a worker.
    """
    import jax

    if not axes:
        return []
    sharded_axes: set[str] = set()
    for leaf in jax.tree.leaves(state.replica.params):
        sharded_axes.update(jax.tree.leaves(tuple(leaf.sharding.spec)))
    return [x for x, size in axes.items() if size > 1 and x not in sharded_axes]
