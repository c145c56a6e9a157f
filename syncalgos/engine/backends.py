"""Programs of one worker, mapped over all of them by any backend."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from syncalgos.collectives import PyTree
from syncalgos.engine.layout import DEVICES, LANES, Layout, is_key

_DEBUGGING = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")


def debugging() -> bool:
    """Whether jax finds what it is asked for by calling again, uncompiled."""
    return any(getattr(jax.config, name) for name in _DEBUGGING)


def spread(
    layout: Layout,
    worker_program: Callable[..., tuple[PyTree, PyTree]],
    donate: bool,
    equal: tuple[bool, ...] | None = None,
) -> Any:
    """Maps one worker's program over all workers.

    Args:
        layout: where the workers live.
        worker_program: (own, shared, batches) -> (own, common), one worker's view, with
            collectives over WORKERS; `common` must be equal on all workers.
        donate: whether the buffers of `own` are given up to the result.
        equal: for each leaf of `own`, whether it is equal in all lanes before and
            after, and held once; None where no leaf is known to be.

    Returns:
        A jitted (own, (shared, batches)) -> (own, common). Leaves of `own` lead with
        (devices, lanes); those of batches with (steps, devices, lanes); those of shared
        and common have no worker axes.
    """
    lanes = layout.lanes

    def on_device(own, rest):
        shared, batches = rest
        own, axes = held_once(own, equal, lanes)
        if lanes == 1:  # an axis of size 1 would make slower matmuls
            batches = jax.tree.map(lambda x: x[:, 0], batches)
        own, common = jax.vmap(
            worker_program,
            in_axes=(axes, None, None if lanes == 1 else 1),
            axis_name=LANES,
            axis_size=lanes,
        )(own, shared, batches)
        return own, jax.tree.map(lambda x: x[0], common)

    return over_devices(layout, on_device, donate)


def held_once(
    own: PyTree, equal: tuple[bool, ...] | None, lanes: int
) -> tuple[PyTree, PyTree]:
    """Takes leaves that are equal in all lanes once; returns vmap's axes, too."""
    leaves, form = jax.tree.flatten(own)
    once = [lanes == 1] * len(leaves) if equal is None else equal
    pairs = [*zip(leaves, once, strict=True)]
    held = form.unflatten([x[0] if is_once else x for x, is_once in pairs])
    return held, form.unflatten([None if is_once else 0 for is_once in once])


def over_devices(
    layout: Layout, on_device: Callable[..., tuple[PyTree, PyTree]], donate: bool
) -> Any:
    """Maps a device's program over all devices: see `spread`.

    Args:
        layout: where the workers live.
        on_device: (own, (shared, batches)) -> (own, common), where leaves of `own` lead
            with the lanes, and those of batches with (steps, lanes). It may talk over
            the devices; `common` must be equal on all.
        donate: as in `spread`.
    """
    mapped = {"pmap": _pmapped, "shard_map": _shard_mapped, "vmap": _vmapped}
    backend = layout.backend
    if layout.processes > 1 and debugging():
        backend = "shard_map"  # pmap called as it is returns the parts of this process
    donated = (0,) if donate else ()
    return mapped[backend](on_device, layout, donated)


def lower(layout: Layout, mapped: Any, arguments: PyTree) -> jax.stages.Lowered:
    """Lowers what `spread` returned for these arguments."""

    def here(x):
        # Keys that span processes, which pmap would fetch (jax 0.10.2): as many of this
        # process, which it takes for its part. The compiled program takes them all.
        if not is_key(x) or x.is_fully_replicated:
            return x
        on_one = x.sharding.shard_shape(x.shape)
        shape = [
            n if n == part else part * len(layout.own_devices)
            for n, part in zip(x.shape, on_one, strict=True)
        ]
        return jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(x)), shape)

    if layout.backend == "pmap" and layout.processes > 1:
        arguments = jax.tree.map(here, arguments)
    return mapped.lower(*arguments)


def _pmapped(on_device: Callable, layout: Layout, donated: tuple[int, ...]) -> Any:
    # Nested in two arguments: a flat in_axes tuple is matched to the wrong leaves when
    # there are as many leaves as arguments (jax 0.10.2).
    return jax.pmap(
        on_device,
        axis_name=DEVICES,
        in_axes=(0, (None, 1)),
        out_axes=(0, None),
        devices=layout.devices,
        donate_argnums=donated,
    )


def _shard_mapped(on_device: Callable, layout: Layout, donated: tuple[int, ...]) -> Any:
    def on_block(own, rest):
        shared, batches = rest
        own = jax.tree.map(lambda x: x[0], own)
        batches = jax.tree.map(lambda x: x[:, 0], batches)
        own, common = on_device(own, (shared, batches))
        return jax.tree.map(lambda x: x[None], own), common

    split, same = PartitionSpec(DEVICES), PartitionSpec()
    mapped = jax.shard_map(
        on_block,
        mesh=layout.mesh,
        in_specs=(split, (same, PartitionSpec(None, DEVICES))),
        out_specs=(split, same),
        check_vma=False,
    )
    # Said aloud: what XLA returns of size 0 is replicated, and no argument of the next.
    out = layout.sharding(DEVICES), layout.sharding()
    return jax.jit(mapped, out_shardings=out, donate_argnums=donated)


def _vmapped(on_device: Callable, layout: Layout, donated: tuple[int, ...]) -> Any:
    mapped = jax.vmap(on_device, in_axes=(0, (None, 1)), axis_name=DEVICES)

    def on_all(own, rest):
        own, common = mapped(own, rest)
        return own, jax.tree.map(lambda x: x[0], common)

    return jax.jit(on_all, donate_argnums=donated)
