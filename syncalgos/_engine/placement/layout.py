"""Lays workers over places × lanes, puts their arrays there and reads them back.

With several processes, each process holds some of the devices, and arrays span all
devices. Each process puts its own part there and reads its own part back.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from syncalgos import checks
from syncalgos._held_parts import HeldPart, index_to_bounds, read_pieces
from syncalgos._keys import is_key
from syncalgos.collectives import WORKERS, PyTree

Device = Any  # jax.Device, which type checkers do not accept as a type
DEVICES, LANES = WORKERS
_NO_MESH = Mesh(np.empty((), object), ())
P = ParamSpec("P")
R = TypeVar("R")


def describe_layout(
    workers: int,
    devices: int,
    platform: str,
    lanes: int,
    inner_sizes: Mapping[str, int],
) -> str:
    """Describes workers over devices × lanes: "8 workers on 2 cpu devices × 4 lanes".

    Args:
        workers: the number of workers.
        devices: the number of all devices.
        platform: the devices' platform, such as cpu.
        lanes: the number of workers of a place.
        inner_sizes: the sizes of the axes of the mesh within a worker, by name.
    """

    def count_nouns(number: int, noun: str) -> str:
        return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

    worker_text = count_nouns(workers, "worker")
    if inner_sizes:
        worker_devices = count_nouns(math.prod(inner_sizes.values()), "device")
        axes = ", ".join(f"{name} {size}" for name, size in inner_sizes.items())
        worker_text = f"{worker_text} of {worker_devices} ({axes})"
    device_text = count_nouns(devices, f"{platform} device")
    return f"{worker_text} on {device_text} × {count_nouns(lanes, 'lane')}"


class Layout(NamedTuple):
    """The place of each worker: worker w is lane w % lanes of place w // lanes.

    A place is one device or, if a worker is a mesh, all devices of that mesh.

    Attributes:
        backend: one of BACKENDS.
        devices: all devices, ordered by process; each process has equally many.
        lanes: the number of workers of a place.
        axes: names and sizes of the axes of the mesh within a worker; () if a worker
            is on one device.
        batch_axes: the axes over which a worker's part of a batch is cut.
    """

    backend: str
    devices: tuple[Device, ...]
    lanes: int
    axes: tuple[tuple[str, int], ...] = ()
    batch_axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return describe_layout(
            self.workers,
            len(self.devices),
            self.devices[0].platform,
            self.lanes,
            self.inner,
        )

    @property
    def inner(self) -> dict[str, int]:
        """The sizes of the axes within a worker, by name."""
        return dict(self.axes)

    @property
    def devices_each(self) -> int:
        """The number of devices of a place."""
        return math.prod(self.inner.values())

    @property
    def places(self) -> int:
        """The number of places."""
        return len(self.devices) // self.devices_each

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.places * self.lanes

    @property
    def shape(self) -> tuple[int, int]:
        """(places, lanes), the leading axes of all arrays of the workers."""
        return self.places, self.lanes

    @property
    def processes(self) -> int:
        """The number of processes that hold the devices."""
        return len({device.process_index for device in self.devices})

    @property
    def own_devices(self) -> tuple[Device, ...]:
        """The devices of this process."""
        return tuple(d for d in self.devices if d.process_index == jax.process_index())

    @property
    def own_places(self) -> range:
        """The places with devices of this process."""
        first_place = self.devices.index(self.own_devices[0]) // self.devices_each
        num_places = math.ceil(len(self.own_devices) / self.devices_each)
        return range(first_place, first_place + num_places)

    @property
    def own_shape(self) -> tuple[int, int]:
        """(places, lanes) of this process."""
        return len(self.own_places), self.lanes

    @property
    def own_workers(self) -> range:
        """The numbers of the workers that are at least partly in this process."""
        places = self.own_places
        return range(places.start * self.lanes, places.stop * self.lanes)

    @property
    def is_whole(self) -> bool:
        """Whether each worker lies within a process."""
        return len(self.own_devices) >= self.devices_each

    @property
    def mesh(self) -> Mesh:
        """The devices as a mesh: places, then the axes within a worker."""
        return _mesh(self.devices, self.axes)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Lets a loss name the axes within a worker while it is only traced."""
        if not self.axes:
            yield
            return
        names, sizes = zip(*self.axes, strict=True)
        with jax.sharding.use_abstract_mesh(
            AbstractMesh(sizes, names, _auto_types(names))
        ):
            yield

    def trace(self, program: Callable, *arguments: PyTree) -> tuple[Any, PyTree]:
        """Returns the jaxpr of a worker's program and the shapes of its results."""
        axis_sizes = [*zip(WORKERS, self.shape, strict=True)]
        return jax.make_jaxpr(program, axis_env=axis_sizes, return_shape=True)(
            *arguments
        )

    @property
    def batch_parts(self) -> int:
        """The number of parts into which a worker's batch is cut."""
        return math.prod(self.inner[name] for name in self.batch_axes)

    @property
    def readers(self) -> int:
        """The number of parts into which all workers cut a global batch."""
        return self.workers * self.batch_parts

    @property
    def batch_spec(self) -> PartitionSpec:
        """The sharding of batches, (places, lanes, batch, ...)."""
        if not self.batch_axes:
            return PartitionSpec(DEVICES)
        return PartitionSpec(DEVICES, None, self.batch_axes)

    @property
    def feeders(self) -> int:
        """The size of the global batch divided by that of this process's part."""
        if not self.axes:
            return self.processes
        return self.readers // len(self.own_rows(self.readers))

    def own_rows(self, batch: int) -> np.ndarray:
        """The rows of a global batch that this process gives to `run`, in order.

        Args:
            batch: the size of the global batch, which the workers divide.

        Raises:
            ValueError: the workers do not divide it.
        """
        checks.global_batch(batch, self.workers)
        rows = np.arange(batch)
        rows = rows.reshape(
            *self.shape, batch // self.workers
        )  # (places, lanes, batch)
        sharding = NamedSharding(self.mesh, self.batch_spec)
        indices_by_device = sharding.devices_indices_map(rows.shape)
        return np.unique([rows[indices_by_device[x]] for x in self.own_devices])

    @property
    def blocking(self) -> bool:
        """Whether a dispatch must end before the next one starts."""
        # Several CPU executions with collectives in flight deadlock in one process:
        # the rendezvous aborts after 40 s, with pmap and jit(shard_map), even without
        # async dispatch. One execution at a time is reliable and faster.
        return len(self.devices) > 1 and self.devices[0].platform == "cpu"

    def sharding(self, *axes: str | None) -> jax.sharding.Sharding:
        """Returns an array's sharding over mesh axes; no axes: one copy per device."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def shard_workers(self, spec: PartitionSpec) -> jax.sharding.Sharding:
        """Returns the sharding of (places, lanes, ...), cut in a worker by `spec`."""
        return self.sharding(DEVICES, None, *spec) if spec else self.sharding(DEVICES)

    def split(self, x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        """Puts this process's part of an array on its devices.

        Together, the parts of all processes are one array.
        """
        if self.processes == 1:
            return jax.device_put(x, sharding)
        if is_key(x):  # they have no NumPy form
            return change_key_words(lambda words: self.split(words, sharding), x)
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    def cut(self, x: Any) -> Any:
        """Cuts (steps, global batch, ...) to (steps, places, lanes, batch, ...)."""
        worker_batch = x.shape[1] // len(self.own_workers)  # no -1: a size may be 0
        parts = x.reshape(len(x), *self.own_shape, worker_batch, *x.shape[2:])
        if isinstance(x, jax.Array) or self.processes > 1 or self.axes:
            return self.split(parts, self.sharding(None, *self.batch_spec))
        return parts

    def copy(self, x: Any) -> jax.Array:
        """Puts a copy of an array on every device; all processes give the same one."""
        # jax.device_put would send the array to all processes to compare it.
        sharding = self.sharding()
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        if self.processes == 1:
            return jax.device_put(x, sharding)
        copies = [jax.device_put(x, device) for device in self.own_devices]
        return jax.make_array_from_single_device_arrays(np.shape(x), sharding, copies)

    def spread(self, x: Any, spec: PartitionSpec) -> jax.Array:
        """Puts an array on the devices of each worker, cut over them by `spec`.

        All processes give the same array, or an array that spans them all.
        """
        sharding = self.sharding(*spec)
        if not spec:
            return self.copy(x)
        if self.processes == 1:
            return jax.device_put(x, sharding)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.jit(lambda x: x, out_shardings=sharding)(x)
        array = np.asarray(x)
        return jax.make_array_from_callback(np.shape(x), sharding, array.__getitem__)

    def take_first_worker_copy(self, x: jax.Array) -> jax.Array:
        """Returns the copy of an array on the devices of this process's first worker.

        Args:
            x: an array; each worker has a copy, cut over the worker's devices.
        """
        if not self.axes:
            return jax.device_put(self.one_copy(x), self.own_devices[0])
        if is_key(x):
            return change_key_words(self.take_first_worker_copy, x)
        worker_devices = self.mesh.devices[self.own_places.start]
        sharding: Any = x.sharding
        mesh = Mesh(worker_devices, tuple(self.inner), _auto_types(self.inner))
        worker_sharding = NamedSharding(mesh, sharding.spec)
        devices = worker_sharding.device_set
        shards = [s.data for s in x.addressable_shards if s.device in devices]
        return jax.make_array_from_single_device_arrays(
            x.shape, worker_sharding, shards
        )

    def one_copy(self, x: jax.Array) -> jax.Array:
        """Returns this process's first copy of an array that all devices hold."""
        return x if self.processes == 1 else x.addressable_data(0)

    def part(self, x: jax.Array) -> jax.Array | np.ndarray | HeldPart:
        """Returns this process's part of an array that leads with (places, lanes).

        Returns:
            A NumPy array (workers here, ...), or a jax.Array for typed keys. If workers
            span processes, a HeldPart of the array.
        """
        if is_key(x):
            return change_key_words(self.part, x)
        first_place = self.own_places.start
        pieces = {}
        for bounds, piece in read_pieces(x).items():
            (start, end), _, *inner_bounds = bounds
            first_worker = (start - first_place) * self.lanes
            end_worker = (end - first_place) * self.lanes
            num_workers = end_worker - first_worker  # no -1: a leaf may be of size 0
            worker_piece = piece.reshape(num_workers, *piece.shape[2:])
            pieces[(first_worker, end_worker), *inner_bounds] = worker_piece
        shape = len(self.own_workers), *x.shape[2:]
        joined = HeldPart(shape, x.dtype, pieces).joined
        if not isinstance(joined, HeldPart):
            return joined
        # Copied, because the next run reuses the devices' memory.
        copies = {bounds: piece.copy() for bounds, piece in pieces.items()}
        return HeldPart(shape, x.dtype, copies)

    def unpart(self, x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        """Puts the result of `part` on this process's devices again.

        Raises:
            ValueError: a HeldPart lacks pieces that belong to this process.
        """
        if self.is_whole:
            if isinstance(x, HeldPart):
                raise ValueError(
                    "held has parts of workers that spanned several processes: here "
                    "each worker lies in one process, and needs whole arrays"
                )
            return self.split(x.reshape(*self.own_shape, *x.shape[1:]), sharding)
        if is_key(x):
            return change_key_words(
                lambda words: self.unpart(np.asarray(words), sharding), x
            )
        shape = *self.shape, *x.shape[1:]  # (places, lanes, …)

        def read_shard(index: Any) -> np.ndarray:
            if isinstance(x, HeldPart):
                inner_bounds = index_to_bounds(index, shape)[2:]
                return x.read(((0, self.lanes), *inner_bounds))[None]
            return x[:, *index[2:]][None]

        return jax.make_array_from_callback(shape, sharding, read_shard)


@functools.cache  # asked for at each dispatch
def _mesh(devices: tuple[Device, ...], axes: tuple[tuple[str, int], ...]) -> Mesh:
    names = [DEVICES] + [name for name, _ in axes]
    sizes = [size for _, size in axes]
    places = len(devices) // math.prod(sizes)
    device_grid = np.array(devices).reshape(places, *sizes)  # (places, *sizes)
    return Mesh(device_grid, tuple(names), _auto_types(names))


def _auto_types(names: Collection[str]) -> tuple[AxisType, ...]:
    """The type of each axis; jax 0.12 has Explicit by default."""
    return (AxisType.Auto,) * len(names)


def change_key_words(change: Callable[[jax.Array], Any], keys: jax.Array) -> jax.Array:
    """Applies a function to the array of integers (words) behind typed keys."""
    words = jnp.asarray(change(jax.random.key_data(keys)))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(keys))


def outside_meshes(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function to run as if the user's program had set no mesh."""

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        # Inside `jax.set_mesh`, jax maps over that mesh only.
        if jax.sharding.get_abstract_mesh().empty:
            return function(*args, **kwargs)
        with jax.set_mesh(_NO_MESH):
            return function(*args, **kwargs)

    return outside
