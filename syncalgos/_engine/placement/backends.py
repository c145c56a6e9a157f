"""Maps one worker's programs over all workers with any backend."""

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from syncalgos._engine.placement.layout import DEVICES, LANES, Layout
from syncalgos._engine.placement.shardings import make_shardings
from syncalgos._engine.program import Inputs, Outputs, Program
from syncalgos._keys import is_key
from syncalgos.reducers._stacking.shards import Sharding

Replicated = tuple[bool, ...] | None  # for each leaf; None: no leaf is replicated


def is_compiled() -> bool:
    """Whether programs are compiled: jax.disable_jit runs them line by line."""
    return not jax.config.jax_disable_jit  # pyright: ignore


def vectorized(
    program: Callable[[Any, Inputs], Outputs],
    lanes: int,
    replicated: Replicated,
    worker_state: Any,
    inputs: Inputs,
) -> Outputs:
    """Runs one worker's program for all lanes of a device, under vmap.

    Args:
        program: (worker_state, inputs) -> Outputs, one worker's view, with collectives
            over WORKERS.
        lanes: the number of workers on a device.
        replicated: for each leaf of `worker_state`, whether it is held once because it
            is identical in all lanes before and after the program.
        worker_state: the workers' data; leaves lead with the lanes.
        inputs: the program's inputs; leaves of batches lead with (steps, lanes).
    """
    worker_state, axes = hold_replicated_once(worker_state, replicated, lanes)
    batch_axis = 1
    if lanes == 1:
        # An axis of one lane is not mapped: batched matmuls of size 1 take at least
        # 10 % longer on CPUs.
        batches = jax.tree.map(lambda x: x[:, 0], inputs.batches)  # (steps, batch, …)
        inputs = inputs._replace(batches=batches)
        batch_axis = None
    in_axes = axes, Inputs(shared=None, batches=batch_axis)
    mapped = jax.vmap(program, in_axes, axis_name=LANES, axis_size=lanes)
    worker_state, common = mapped(worker_state, inputs)
    return Outputs(worker_state, jax.tree.map(lambda x: x[0], common))


def hold_replicated_once(
    worker_state: Any, replicated: Replicated, lanes: int
) -> tuple[Any, Any]:
    """Takes replicated leaves once, and also returns vmap's axes of all leaves."""
    leaves, structure = jax.tree.flatten(worker_state)
    if replicated is None:
        replicated = (lanes == 1,) * len(leaves)
    held_leaves = []
    axes = []
    for leaf, is_replicated in zip(leaves, replicated, strict=True):
        held_leaves.append(leaf[0] if is_replicated else leaf)
        axes.append(None if is_replicated else 0)
    return structure.unflatten(held_leaves), structure.unflatten(axes)


def over_devices(
    layout: Layout, on_device: Callable[[Any, Inputs], Outputs], donate: bool
) -> Any:
    """Maps a device's program over all devices.

    Args:
        layout: the place of each worker.
        on_device: (worker_state, inputs) -> Outputs for all lanes of a device. Leaves
            of worker_state lead with the lanes, those of batches with (steps, lanes).
            It may communicate over the devices; `common` must be identical on all
            devices.
        donate: whether the buffers of `worker_state` are given up to the result.

    Returns:
        A jitted (worker_state, inputs) -> Outputs. Leaves of worker_state lead with
        (devices, lanes), those of batches with (steps, devices, lanes); those of shared
        and common have no worker axes. If workers are meshes, it must be jitted again,
        with the `make_output_shardings` of its results.
    """
    map_by_backend = {
        "pmap": _map_by_pmap,
        "shard_map": _map_by_shard_map,
        "vmap": _map_by_vmap,
    }
    backend = layout.backend
    if backend == "pmap" and not is_compiled():
        # An uncompiled pmap returns the parts of this process instead of global arrays.
        backend = "shard_map"
    donated = (0,) if donate else ()
    return map_by_backend[backend](on_device, layout, donated)


def make_output_shardings(
    layout: Layout, program: Program, sharding: Sharding | None, shapes: Outputs
) -> Outputs:
    """Returns the sharding of each array that a program returns.

    Args:
        layout: a layout with backend shard_map.
        program: the program that returns the arrays.
        sharding: the sharding of params if workers are meshes.
        shapes: shapes of the result; leaves of worker_state lead with (places, lanes).
    """

    def shard_common(path: Any, x: Any) -> jax.sharding.Sharding:
        if sharding is None or not program.makes_model:
            return layout.sharding()
        return layout.sharding(*sharding.spec(path, x.shape))

    common = jax.tree_util.tree_map_with_path(shard_common, shapes.common)
    worker_state = make_shardings(shapes.worker_state, layout, sharding, leading=2)
    return Outputs(worker_state, common)


def lower(
    layout: Layout, mapped: Any, worker_state: Any, inputs: Inputs
) -> jax.stages.Lowered:
    """Lowers the result of `over_devices` for these arguments."""

    def take_own_keys(x: jax.Array) -> jax.Array:
        # pmap would fetch keys that span processes (jax 0.10.2). To lower, it accepts
        # as many keys as this process holds; the compiled program takes all keys.
        if not is_key(x) or x.is_fully_replicated:
            return x
        num_devices = len(layout.own_devices)
        shape = []
        shard_shape = x.sharding.shard_shape(x.shape)
        for size, shard_size in zip(x.shape, shard_shape, strict=True):
            shape.append(size if size == shard_size else shard_size * num_devices)
        return jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(x)), shape)

    if layout.backend == "pmap" and layout.processes > 1:
        worker_state = jax.tree.map(take_own_keys, worker_state)
        inputs = jax.tree.map(take_own_keys, inputs)
    lowered = mapped.lower(worker_state, inputs)
    if layout.backend == "pmap":
        _evict_from_cache(mapped)
    return lowered


def _evict_from_cache(mapped: Any) -> None:
    """Removes a function of jax.pmap from jax's cache."""
    # The cache refers weakly to the function, but its entry holds a program that holds
    # the function (jax 0.10.2). So the user's loss and data and the program's memory
    # would never be freed. jax has no public way to remove one entry; it can only clear
    # all caches.
    with suppress(ImportError, AttributeError):  # another jax version, another place
        pmap_cache = importlib.import_module("jax._src.pmap")._cached_shard_map
        pmap_cache.evict_function(mapped.__wrapped__)


def _map_by_pmap(on_device: Callable, layout: Layout, donated: tuple[int, ...]) -> Any:
    # Two arguments, the second nested: jax 0.10.2 matches a flat in_axes tuple to the
    # wrong leaves if there are as many leaves as arguments. A single argument would
    # donate, and so delete, the user's batches.
    return jax.pmap(
        on_device,
        axis_name=DEVICES,
        in_axes=(0, Inputs(shared=None, batches=1)),
        out_axes=Outputs(worker_state=0, common=None),
        devices=layout.devices,
        donate_argnums=donated,
    )


def _map_by_shard_map(
    on_device: Callable, layout: Layout, donated: tuple[int, ...]
) -> Any:
    def on_block(worker_state: Any, inputs: Inputs) -> Outputs:
        worker_state = jax.tree.map(lambda x: x[0], worker_state)  # (lanes, …)
        batches = jax.tree.map(lambda x: x[:, 0], inputs.batches)  # (steps, lanes, …)
        outputs = on_device(worker_state, inputs._replace(batches=batches))
        worker_state = jax.tree.map(lambda x: x[None], outputs.worker_state)
        return outputs._replace(worker_state=worker_state)  # (1, lanes, …)

    split_spec = PartitionSpec(DEVICES)
    common_spec = PartitionSpec()
    # With shard_map's check on, jax.grad sums the gradients of all devices for params
    # that are identical on all devices.
    mapped = jax.shard_map(
        on_block,
        mesh=layout.mesh,
        in_specs=(
            split_spec,
            Inputs(shared=common_spec, batches=PartitionSpec(None, DEVICES)),
        ),
        out_specs=Outputs(worker_state=split_spec, common=common_spec),
        # The compiler partitions over the axes within a worker, by the arrays' shards.
        axis_names={DEVICES},
        check_vma=False,
    )
    if layout.axes:
        return jax.jit(mapped)
    # Explicit, because XLA returns arrays of size 0 as replicated, and the next call
    # would refuse these.
    out_shardings = Outputs(
        worker_state=layout.sharding(DEVICES), common=layout.sharding()
    )
    return jax.jit(mapped, out_shardings=out_shardings, donate_argnums=donated)


def _map_by_vmap(on_device: Callable, layout: Layout, donated: tuple[int, ...]) -> Any:
    in_axes = 0, Inputs(shared=None, batches=1)
    mapped = jax.vmap(on_device, in_axes=in_axes, axis_name=DEVICES)

    def on_all(worker_state: Any, inputs: Inputs) -> Outputs:
        worker_state, common = mapped(worker_state, inputs)
        return Outputs(worker_state, jax.tree.map(lambda x: x[0], common))

    return jax.jit(on_all, donate_argnums=donated)
