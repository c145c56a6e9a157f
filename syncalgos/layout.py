"""Workers laid over devices × lanes, and programs mapped over them by any backend."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from syncalgos import checks
from syncalgos.collectives import WORKERS, PyTree

Device = Any  # jax.Device, which type checkers do not take for a type
BACKENDS = ("pmap", "shard_map", "vmap")
DEVICES, LANES = WORKERS


class Layout(NamedTuple):
    """Where workers live: worker w is lane w % lanes of device w // lanes."""

    backend: str
    devices: tuple[Device, ...]
    lanes: int

    @property
    def workers(self) -> int:
        """Their number."""
        return len(self.devices) * self.lanes

    @property
    def shape(self) -> tuple[int, int]:
        """(devices, lanes), the leading axes of everything that a worker holds."""
        return len(self.devices), self.lanes

    @property
    def mesh(self) -> Mesh:
        """The devices as a mesh of one axis."""
        return Mesh(np.array(self.devices), (DEVICES,))

    @property
    def blocking(self) -> bool:
        """Whether a dispatch must end before the next one starts.

        Several in-process CPU executions with collectives in flight deadlock
        (docs/design.md).
        """
        return len(self.devices) > 1 and self.devices[0].platform == "cpu"

    def sharding(self, *axes: str | None) -> jax.sharding.Sharding:
        """The sharding of an array with these mesh axes; no axes: a copy per device."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def make_layout(
    workers: int, backend: str, devices: Sequence[Device | int] | None
) -> Layout:
    """Lays workers over devices.

    Args:
        workers: their number, at least 1.
        backend: pmap, shard_map or vmap (one device).
        devices: devices or indices into `jax.devices()`, any subset in any order; None
            takes the largest number of devices that divides the workers.

    Raises:
        ValueError: what is unknown, or devices that do not divide the workers.
    """
    workers = checks.whole("workers", workers, least=1)
    checks.one_of("backend", backend, BACKENDS)
    if devices is None:
        known = jax.devices()
        most = 1 if backend == "vmap" else min(len(known), workers)
        count = next(n for n in range(most, 0, -1) if workers % n == 0)
        return Layout(backend, tuple(known[:count]), workers // count)
    if not isinstance(devices, Iterable) or isinstance(devices, str):
        raise ValueError(
            f"devices must be a list of indices or devices, got {devices!r}"
        )
    chosen = tuple(_device(device) for device in devices)
    if len(set(chosen)) != len(chosen) or not chosen:
        raise ValueError(f"devices must be distinct and at least one, got {devices!r}")
    if backend == "vmap" and len(chosen) > 1:
        raise ValueError(f"backend 'vmap' runs on one device, got {len(chosen)}")
    if workers % len(chosen):
        raise ValueError(
            f"{workers} workers do not divide over {len(chosen)} devices: use a "
            f"multiple of {len(chosen)}, or other devices"
        )
    return Layout(backend, chosen, workers // len(chosen))


def _device(device: Any) -> Device:
    if isinstance(device, jax.Device):
        return device
    known = jax.devices()
    number = checks.whole("a device", device, least=0)
    if number >= len(known):
        names = ", ".join(str(i) for i in range(len(known)))
        raise ValueError(f"device {number} does not exist (there are: {names})")
    return known[number]


def spread(
    layout: Layout, worker_program: Callable[..., tuple[PyTree, PyTree]], donate: bool
) -> Any:
    """Maps one worker's program over all workers.

    Args:
        layout: where the workers live.
        worker_program: (own, shared, batches) -> (own, common), one worker's view, with
            collectives over WORKERS; `common` must be equal on all workers.
        donate: whether the buffers of `own` are given up to the result.

    Returns:
        A jitted (own, (shared, batches)) -> (own, common). Leaves of `own` lead with
        (devices, lanes); those of batches with (steps, devices, lanes); those of shared
        and common have no worker axes.
    """

    def on_device(own, rest):
        own, common = jax.vmap(
            worker_program,
            in_axes=(0, None, 1),
            axis_name=LANES,
            axis_size=layout.lanes,
        )(own, *rest)
        return own, jax.tree.map(lambda x: x[0], common)

    over_devices = {"pmap": _pmapped, "shard_map": _shard_mapped, "vmap": _vmapped}
    donated = (0,) if donate else ()
    return over_devices[layout.backend](on_device, layout, donated)


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
    return jax.jit(mapped, donate_argnums=donated)


def _vmapped(on_device: Callable, layout: Layout, donated: tuple[int, ...]) -> Any:
    mapped = jax.vmap(on_device, in_axes=(0, (None, 1)), axis_name=DEVICES)

    def on_all(own, rest):
        own, common = mapped(own, rest)
        return own, jax.tree.map(lambda x: x[0], common)

    return jax.jit(on_all, donate_argnums=donated)
