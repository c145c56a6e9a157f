"""Workers laid over devices × lanes; their arrays put there and read back.

In several processes each holds some of the devices, and arrays span them all: a process
puts its own part, and reads its own part back.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from syncalgos import checks
from syncalgos.collectives import WORKERS

Device = Any  # jax.Device, which type checkers do not take for a type
BACKENDS = ("pmap", "shard_map", "vmap")
DEVICES, LANES = WORKERS
_process_of = attrgetter("process_index")


class Layout(NamedTuple):
    """The place of each worker: worker w is lane w % lanes of device w // lanes.

    Attributes:
        backend: one of BACKENDS.
        devices: as many of each process, one process after the other.
        lanes: workers of a device.
    """

    backend: str
    devices: tuple[Device, ...]
    lanes: int

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.devices) * self.lanes

    @property
    def shape(self) -> tuple[int, int]:
        """(devices, lanes), the leading axes of all that belongs to the workers."""
        return len(self.devices), self.lanes

    @property
    def processes(self) -> int:
        """The number of processes that hold the devices."""
        return len({device.process_index for device in self.devices})

    @property
    def own_devices(self) -> tuple[Device, ...]:
        """The devices of this process."""
        here = jax.process_index()
        return tuple(d for d in self.devices if d.process_index == here)

    @property
    def own_shape(self) -> tuple[int, int]:
        """(devices, lanes) of this process."""
        return len(self.own_devices), self.lanes

    @property
    def own_workers(self) -> range:
        """The numbers of the workers in this process."""
        first = self.devices.index(self.own_devices[0]) * self.lanes
        return range(first, first + len(self.own_devices) * self.lanes)

    @property
    def mesh(self) -> Mesh:
        """The devices as a mesh of one axis."""
        return Mesh(np.array(self.devices), (DEVICES,))

    @property
    def blocking(self) -> bool:
        """Whether a dispatch must end before the next one starts."""
        # Several CPU executions with collectives in flight deadlock in one process:
        # the rendezvous aborts after 40 s, with pmap and jit(shard_map), even without
        # async dispatch. One in flight is reliable, and faster.
        return len(self.devices) > 1 and self.devices[0].platform == "cpu"

    def sharding(self, *axes: str | None) -> jax.sharding.Sharding:
        """The sharding of an array with these mesh axes; no axes: a copy per device."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def split(self, x: Any, *axes: str | None) -> jax.Array:
        """Puts this process's part of an array on its devices, along these mesh axes.

        Together, the parts of all processes are one array.
        """
        sharding = self.sharding(*axes)
        if self.processes == 1:
            return jax.device_put(x, sharding)
        if is_key(x):  # they have no NumPy form
            raw = self.split(jax.random.key_data(x), *axes)
            return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(x))
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    def cut(self, x: Any) -> Any:
        """(steps, global batch, ...) to (steps, devices, lanes, batch, ...)."""
        here = len(self.own_workers)  # no -1: a leaf may be of size 0
        cut = x.reshape(len(x), *self.own_shape, x.shape[1] // here, *x.shape[2:])
        is_put = isinstance(x, jax.Array) or self.processes > 1
        return self.split(cut, None, DEVICES) if is_put else cut

    def copy(self, x: Any) -> jax.Array:
        """Puts a copy of an array on every device; all processes give the same."""
        # jax.device_put would send the array round all processes to compare it.
        sharding = self.sharding()
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        if self.processes == 1:
            return jax.device_put(x, sharding)
        copies = [jax.device_put(x, device) for device in self.own_devices]
        return jax.make_array_from_single_device_arrays(np.shape(x), sharding, copies)

    def one_copy(self, x: jax.Array) -> jax.Array:
        """This process's first copy of an array that all devices hold."""
        return x if self.processes == 1 else x.addressable_data(0)

    def part(self, x: jax.Array) -> jax.Array | np.ndarray:
        """This process's part of an array that leads with (devices, lanes).

        Returns:
            A NumPy array, (workers here, ...); of typed keys a jax.Array.
        """
        raw = jax.random.key_data(x) if is_key(x) else x
        shards = sorted(raw.addressable_shards, key=lambda s: s.index[0].start or 0)
        whole = np.concatenate([np.asarray(s.data) for s in shards])
        whole = whole.reshape(len(self.own_workers), *whole.shape[2:])
        if not is_key(x):
            return whole
        return jax.random.wrap_key_data(jnp.asarray(whole), impl=jax.random.key_impl(x))

    def unpart(self, x: Any) -> jax.Array:
        """Puts the result of `part` on this process's devices again."""
        return self.split(x.reshape(*self.own_shape, *x.shape[1:]), DEVICES)


def is_key(x: Any) -> bool:
    """Whether an array is of typed random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def make_layout(
    workers: int,
    backend: str,
    devices: Sequence[Device | int] | None,
    lanes: int | None = None,
) -> Layout:
    """Lays workers over devices.

    Args:
        workers: their number, at least 1.
        backend: pmap, shard_map or vmap (one device).
        devices: devices or indices into `jax.devices()`, any subset in any order; None
            takes the largest number of devices that divides the workers.
        lanes: workers of a device; devices=None takes the first workers / lanes.

    In several processes, devices=None takes as many of each.

    Raises:
        ValueError: an unknown argument, or devices or lanes that do not divide the
            workers.
    """
    workers = checks.whole("workers", workers, least=1)
    checks.one_of("backend", backend, BACKENDS)
    if lanes is not None:
        lanes = checks.whole("lanes", lanes, least=1)
        if workers % lanes:
            raise ValueError(f"{lanes} lanes do not divide {workers} workers")
    if devices is None:
        return _widest(workers, backend, lanes)
    chosen = _chosen(devices)
    if backend == "vmap" and len(chosen) > 1:
        raise ValueError(f"backend 'vmap' runs on one device, got {len(chosen)}")
    if workers % len(chosen):
        raise ValueError(
            f"{workers} workers do not divide over {len(chosen)} devices: use a "
            f"multiple of {len(chosen)}, or other devices"
        )
    if lanes not in (None, workers // len(chosen)):
        raise ValueError(
            f"{workers} workers on {len(chosen)} devices are {workers // len(chosen)} "
            f"lanes, not {lanes}"
        )
    _check_processes(chosen)
    return Layout(backend, chosen, workers // len(chosen))


def _widest(workers: int, backend: str, lanes: int | None) -> Layout:
    """Takes the most devices that divide the workers, or those that the lanes need."""
    processes = jax.process_count()
    if backend == "vmap" and processes > 1:
        raise ValueError(
            f"backend 'vmap' runs on one device, but there are {processes} processes: "
            "use pmap or shard_map"
        )
    each, rest = divmod(workers, processes)
    if rest:
        raise ValueError(
            f"{workers} workers do not divide over {processes} processes: use a "
            f"multiple of {processes}"
        )
    by_process = groupby(sorted(jax.devices(), key=_process_of), _process_of)
    known = [[*devices] for _, devices in by_process]
    most = 1 if backend == "vmap" else min(each, *map(len, known))
    if lanes is not None and (each % lanes or each // lanes > most):
        needed = -(-workers // lanes)
        raise ValueError(
            f"{workers} workers with {lanes} lanes need {needed} devices, as many of "
            f"each process; there are {most * processes} to choose from"
        )
    if lanes is None:
        count = next(n for n in range(most, 0, -1) if each % n == 0)
    else:
        count = each // lanes
    chosen = tuple(device for devices in known for device in devices[:count])
    return Layout(backend, chosen, each // count)


def _chosen(devices: Any) -> tuple[Device, ...]:
    """The devices of a list of devices or indices."""
    if not isinstance(devices, Iterable) or isinstance(devices, str):
        raise ValueError(
            f"devices must be a list of indices or devices, got {devices!r}"
        )
    chosen = tuple(_device(device) for device in devices)
    if len(set(chosen)) != len(chosen) or not chosen:
        raise ValueError(f"devices must be distinct and at least one, got {devices!r}")
    return chosen


def _check_processes(devices: tuple[Device, ...]) -> None:
    """Raises a ValueError unless each process has as many devices, in one stretch."""
    stretches = [(p, len([*each])) for p, each in groupby(devices, _process_of)]
    once = len({p for p, _ in stretches}) == len(stretches)
    if not once or len({count for _, count in stretches}) > 1:
        raise ValueError(
            "devices of a process must follow one another, and be as many of each "
            f"process, got those of processes {[d.process_index for d in devices]}"
        )
    if jax.process_index() not in dict(stretches):
        raise ValueError(
            f"devices must have some of each process that uses them, and hold none of "
            f"process {jax.process_index()}"
        )


def _device(device: Any) -> Device:
    if isinstance(device, jax.Device):
        return device
    known = jax.devices()
    number = checks.whole("a device", device, least=0)
    if number >= len(known):
        names = ", ".join(str(i) for i in range(len(known)))
        raise ValueError(f"device {number} does not exist (there are: {names})")
    return known[number]
