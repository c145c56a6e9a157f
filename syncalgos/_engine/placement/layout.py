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
from syncalgos._held_parts import HeldPart, bounds_of, pieces_of
from syncalgos._keys import is_key
from syncalgos.collectives import WORKERS, PyTree

Device = Any  # jax.Device, which type checkers do not accept as a type
DEVICES, LANES = WORKERS
_NO_MESH = Mesh(np.empty((), object), ())
P = ParamSpec("P")
R = TypeVar("R")


def in_words(
    workers: int, devices: int, platform: str, lanes: int, inner: Mapping[str, int]
) -> str:
    """Describes workers over devices × lanes: "8 workers on 2 cpu devices × 4 lanes".

    Args:
        workers: the number of workers.
        devices: the number of all devices.
        platform: the devices' platform, such as cpu.
        lanes: the number of workers of a place.
        inner: the sizes of the axes of the mesh within a worker, by name.
    """

    def counted(number: int, noun: str) -> str:
        return f"{number} {noun}{'' if number == 1 else 's'}"

    shown_workers = counted(workers, "worker")
    if inner:
        worker_devices = counted(math.prod(inner.values()), "device")
        axes = ", ".join(f"{name} {size}" for name, size in inner.items())
        shown_workers = f"{shown_workers} of {worker_devices} ({axes})"
    places = counted(devices, f"{platform} device")
    return f"{shown_workers} on {places} × {counted(lanes, 'lane')}"


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
        count, platform = len(self.devices), self.devices[0].platform
        return in_words(self.workers, count, platform, self.lanes, self.inner)

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
        first = self.devices.index(self.own_devices[0]) // self.devices_each
        return range(first, first - (-len(self.own_devices) // self.devices_each))

    @property
    def own_shape(self) -> tuple[int, int]:
        """(places, lanes) of this process."""
        return len(self.own_places), self.lanes

    @property
    def own_workers(self) -> range:
        """The numbers of the workers that are at least partly in this process."""
        first, stop = self.own_places.start, self.own_places.stop
        return range(first * self.lanes, stop * self.lanes)

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
        with jax.sharding.use_abstract_mesh(AbstractMesh(sizes, names, _auto(names))):
            yield

    def traced(self, program: Callable, *given: PyTree) -> tuple[Any, PyTree]:
        """Returns the jaxpr of a worker's program and the shapes of its results."""
        sizes = [*zip(WORKERS, self.shape, strict=True)]
        return jax.make_jaxpr(program, axis_env=sizes, return_shape=True)(*given)

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
        inner = (None, self.batch_axes) if self.batch_axes else ()
        return PartitionSpec(DEVICES, *inner)

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
        rows = np.arange(batch).reshape(*self.shape, batch // self.workers)
        at = NamedSharding(self.mesh, self.batch_spec).devices_indices_map(rows.shape)
        return np.unique([rows[at[x]] for x in self.own_devices])

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

    def of_workers(self, spec: PartitionSpec) -> jax.sharding.Sharding:
        """Returns the sharding of (places, lanes, ...), cut in a worker by `spec`."""
        return self.sharding(DEVICES, None, *spec) if spec else self.sharding(DEVICES)

    def split(self, x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        """Puts this process's part of an array on its devices.

        Together, the parts of all processes are one array.
        """
        if self.processes == 1:
            return jax.device_put(x, sharding)
        if is_key(x):  # they have no NumPy form
            return on_words(lambda words: self.split(words, sharding), x)
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    def cut(self, x: Any) -> Any:
        """Cuts (steps, global batch, ...) to (steps, places, lanes, batch, ...)."""
        here = len(self.own_workers)  # no -1: a leaf may be of size 0
        cut = x.reshape(len(x), *self.own_shape, x.shape[1] // here, *x.shape[2:])
        is_put = isinstance(x, jax.Array) or self.processes > 1 or bool(self.axes)
        return self.split(cut, self.sharding(None, *self.batch_spec)) if is_put else cut

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
        if self.processes == 1 or not spec:
            return jax.device_put(x, sharding) if spec else self.copy(x)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.jit(lambda x: x, out_shardings=sharding)(x)
        whole = np.asarray(x)
        return jax.make_array_from_callback(np.shape(x), sharding, whole.__getitem__)

    def of_first_worker(self, x: jax.Array) -> jax.Array:
        """Returns the copy of an array on the devices of this process's first worker.

        Args:
            x: an array; each worker has a copy, cut over the worker's devices.
        """
        if not self.axes:
            return jax.device_put(self.one_copy(x), self.own_devices[0])
        if is_key(x):
            return on_words(self.of_first_worker, x)
        grid = self.mesh.devices[self.own_places.start]
        sharding: Any = x.sharding
        mesh = Mesh(grid, tuple(self.inner), _auto(self.inner))
        here = NamedSharding(mesh, sharding.spec)
        own = [s.data for s in x.addressable_shards if s.device in here.device_set]
        return jax.make_array_from_single_device_arrays(x.shape, here, own)

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
            return on_words(self.part, x)
        before, pieces = self.own_places.start, {}
        for ((first, stop), _, *inner), piece in pieces_of(x).items():
            workers = tuple((place - before) * self.lanes for place in (first, stop))
            count = workers[1] - workers[0]  # no -1: a leaf may be of size 0
            pieces[workers, *inner] = piece.reshape(count, *piece.shape[2:])
        shape = len(self.own_workers), *x.shape[2:]
        found = HeldPart(shape, x.dtype, pieces).joined
        if not isinstance(found, HeldPart):
            return found
        # Copied, because the next run reuses the devices' memory.
        return HeldPart(shape, x.dtype, {at: y.copy() for at, y in pieces.items()})

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
            return on_words(lambda words: self.unpart(np.asarray(words), sharding), x)
        shape = *self.shape, *x.shape[1:]

        def at(index):
            if isinstance(x, HeldPart):
                inner = bounds_of(index, shape)[2:]
                return x.read(((0, self.lanes), *inner))[None]
            return x[:, *index[2:]][None]

        return jax.make_array_from_callback(shape, sharding, at)


@functools.cache  # asked for at each dispatch
def _mesh(devices: tuple[Device, ...], axes: tuple[tuple[str, int], ...]) -> Mesh:
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    grid = np.array(devices).reshape(len(devices) // math.prod(sizes), *sizes)
    return Mesh(grid, (DEVICES, *names), _auto((DEVICES, *names)))


def _auto(names: Collection[str]) -> tuple[AxisType, ...]:
    """The type of each axis; jax 0.12 has Explicit by default."""
    return (AxisType.Auto,) * len(names)


def on_words(change: Callable[[jax.Array], Any], keys: jax.Array) -> jax.Array:
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
