"""Maps one worker's programs over all workers with any backend."""

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from syncalgos._engine.placement.layout import DEVICES, LANES, Layout
from syncalgos._engine.placement.shardings import placed
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
    own: Any,
    inputs: Inputs,
) -> Outputs:
    """Runs one worker's program for all lanes of a device, under vmap.

    Args:
        program: (own, inputs) -> Outputs, one worker's view, with collectives over
            WORKERS.
        lanes: the number of workers on a device.
        replicated: for each leaf of `own`, whether it is held once because it is
            identical in all lanes before and after the program.
        own: the workers' data; leaves lead with the lanes.
        inputs: the program's inputs; leaves of batches lead with (steps, lanes).
    """
    own, axes = held_once(own, replicated, lanes)
    axis = 1
    if lanes == 1:
        # An axis of one lane is not mapped: batched matmuls of size 1 take at least
        # 10 % longer on CPUs.
        batches = jax.tree.map(lambda x: x[:, 0], inputs.batches)
        inputs, axis = inputs._replace(batches=batches), None
    in_axes = axes, Inputs(shared=None, batches=axis)
    mapped = jax.vmap(program, in_axes, axis_name=LANES, axis_size=lanes)
    own, common = mapped(own, inputs)
    return Outputs(own, jax.tree.map(lambda x: x[0], common))


def held_once(own: Any, replicated: Replicated, lanes: int) -> tuple[Any, Any]:
    """Takes replicated leaves once, and also returns vmap's axes of all leaves."""
    leaves, form = jax.tree.flatten(own)
    once = [lanes == 1] * len(leaves) if replicated is None else replicated
    pairs = [*zip(leaves, once, strict=True)]
    held = form.unflatten([x[0] if is_once else x for x, is_once in pairs])
    return held, form.unflatten([None if is_once else 0 for is_once in once])


def over_devices(
    layout: Layout, on_device: Callable[[Any, Inputs], Outputs], donate: bool
) -> Any:
    """Maps a device's program over all devices.

    Args:
        layout: the place of each worker.
        on_device: (own, inputs) -> Outputs for all lanes of a device. Leaves of own
            lead with the lanes, those of batches with (steps, lanes). It may
            communicate over the devices; `common` must be identical on all devices.
        donate: whether the buffers of `own` are given up to the result.

    Returns:
        A jitted (own, inputs) -> Outputs. Leaves of own lead with (devices, lanes),
        those of batches with (steps, devices, lanes); those of shared and common have
        no worker axes. If workers are meshes, it must be jitted again, with the
        `places` of its results.
    """
    mapped = {"pmap": _pmapped, "shard_map": _shard_mapped, "vmap": _vmapped}
    backend = layout.backend
    if backend == "pmap" and not is_compiled():
        # An uncompiled pmap returns the parts of this process instead of global arrays.
        backend = "shard_map"
    donated = (0,) if donate else ()
    return mapped[backend](on_device, layout, donated)


def places(
    layout: Layout, program: Program, sharding: Sharding | None, shapes: Outputs
) -> Outputs:
    """Returns the sharding of each array that a program returns.

    Args:
        layout: a layout with backend shard_map.
        program: the program that returns the arrays.
        sharding: the sharding of params if workers are meshes.
        shapes: shapes of the result; leaves of own lead with (places, lanes).
    """

    def of_common(path, x):
        if sharding is None or not program.makes_model:
            return layout.sharding()
        return layout.sharding(*sharding.spec(path, x.shape))

    common = jax.tree_util.tree_map_with_path(of_common, shapes.common)
    return Outputs(placed(shapes.own, layout, sharding, 2), common)


def lower(layout: Layout, mapped: Any, own: Any, inputs: Inputs) -> jax.stages.Lowered:
    """Lowers the result of `over_devices` for these arguments."""

    def here(x):
        # pmap would fetch keys that span processes (jax 0.10.2). To lower, it accepts
        # as many keys as this process holds; the compiled program takes all keys.
        if not is_key(x) or x.is_fully_replicated:
            return x
        pairs = zip(x.shape, x.sharding.shard_shape(x.shape), strict=True)
        count = len(layout.own_devices)
        shape = [n if n == part else part * count for n, part in pairs]
        return jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(x)), shape)

    if layout.backend == "pmap" and layout.processes > 1:
        own, inputs = jax.tree.map(here, (own, inputs))
    lowered = mapped.lower(own, inputs)
    if layout.backend == "pmap":
        _forget(mapped)
    return lowered


def _forget(mapped: Any) -> None:
    """Removes a function of jax.pmap from jax's cache."""
    # The cache refers weakly to the function, but its entry holds a program that holds
    # the function (jax 0.10.2). So the user's loss and data and the program's memory
    # would never be freed. jax has no public way to remove one entry; it can only clear
    # all caches.
    with suppress(ImportError, AttributeError):  # another jax version, another place
        cached = importlib.import_module("jax._src.pmap")._cached_shard_map
        cached.evict_function(mapped.__wrapped__)


def _pmapped(on_device: Callable, layout: Layout, donated: tuple[int, ...]) -> Any:
    # Two arguments, the second nested: jax 0.10.2 matches a flat in_axes tuple to the
    # wrong leaves if there are as many leaves as arguments. A single argument would
    # donate, and so delete, the user's batches.
    return jax.pmap(
        on_device,
        axis_name=DEVICES,
        in_axes=(0, Inputs(shared=None, batches=1)),
        out_axes=Outputs(own=0, common=None),
        devices=layout.devices,
        donate_argnums=donated,
    )


def _shard_mapped(on_device: Callable, layout: Layout, donated: tuple[int, ...]) -> Any:
    def on_block(own, inputs):
        own = jax.tree.map(lambda x: x[0], own)
        batches = jax.tree.map(lambda x: x[:, 0], inputs.batches)
        outputs = on_device(own, inputs._replace(batches=batches))
        return outputs._replace(own=jax.tree.map(lambda x: x[None], outputs.own))

    split, same = PartitionSpec(DEVICES), PartitionSpec()
    # With shard_map's check on, jax.grad sums the gradients of all devices for params
    # that are identical on all devices.
    mapped = jax.shard_map(
        on_block,
        mesh=layout.mesh,
        in_specs=(split, Inputs(shared=same, batches=PartitionSpec(None, DEVICES))),
        out_specs=Outputs(own=split, common=same),
        # The compiler partitions over the axes within a worker, by the arrays' shards.
        axis_names={DEVICES},
        check_vma=False,
    )
    if layout.axes:
        return jax.jit(mapped)
    # Explicit, because XLA returns arrays of size 0 as replicated, and the next call
    # would refuse these.
    out = Outputs(own=layout.sharding(DEVICES), common=layout.sharding())
    return jax.jit(mapped, out_shardings=out, donate_argnums=donated)


def _vmapped(on_device: Callable, layout: Layout, donated: tuple[int, ...]) -> Any:
    axes = 0, Inputs(shared=None, batches=1)
    mapped = jax.vmap(on_device, in_axes=axes, axis_name=DEVICES)

    def on_all(own, inputs):
        own, common = mapped(own, inputs)
        return Outputs(own, jax.tree.map(lambda x: x[0], common))

    return jax.jit(on_all, donate_argnums=donated)
