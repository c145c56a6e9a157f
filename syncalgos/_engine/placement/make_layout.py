"""Lays workers over devices."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from syncalgos import checks
from syncalgos._calls import suggest_arguments
from syncalgos._engine.placement.layout import DEVICES, LANES, Device, Layout
from syncalgos._engine.placement.shardings import Shardings

BACKENDS = ("pmap", "shard_map", "vmap")
AUTO = "auto"
# Axes with these names cut the model's arithmetic, not the batch.
TENSOR_AXES = ("tensor", "model", "tp")
_process_index = attrgetter("process_index")

AnyMesh = Mesh | Mapping[str, int]
Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Places for workers and arrays that replace the defaults of `DataParallel`.

    Attributes:
        devices: devices or indices into `jax.devices()`, any subset in any order. The
            workers must divide evenly over them. None takes the largest number of
            devices that fits.
        lanes: the number of workers on each device. With devices=None, as many devices
            are taken as needed.
        lane_form: how a device runs its lanes: "vectorized", all in each step;
            "sequential", one lane after the other from one sync to the next; or
            "merged", one gradient of all, for averaged gradients. All give the same
            numbers up to rounding. None takes the fastest known form; it takes "merged"
            only for a loss made by `per_example`. "merged" says that the loss is a mean
            over independent examples, which the first `run` checks on its first
            batches.
        mesh: the axes within a worker that has several devices, such as {"fsdp": 2}, or
            a jax.sharding.Mesh with an axis "devices" for the workers. It needs the
            backend shard_map.
        shardings: how params are cut over these axes (see `Shardings`); None keeps the
            shardings of the params given to `init`. Other arrays shaped like params are
            cut the same way.
        batch_axes: the axes over which a worker's part of a batch is cut; None means
            all axes except those named "tensor", "model" or "tp".

    Example:
        >>> import optax
        >>> from syncalgos import DataParallel, Placement, bmuf
        >>> loss = lambda params, batch: (params - batch).mean() ** 2
        >>> where = Placement(devices=[0])
        >>> sgd = optax.sgd(0.1)
        >>> trainer = DataParallel(loss, sgd, bmuf(4), workers=8, placement=where)
        >>> trainer.layout.lanes
        8
    """

    devices: Sequence[Device | int] | None = None
    _: dataclasses.KW_ONLY
    lanes: int | None = None
    lane_form: str | None = None
    mesh: AnyMesh | None = None
    shardings: Shardings | None = None
    batch_axes: Sequence[str] | None = None


Placement.__init__ = suggest_arguments(Placement.__init__)


class Request(NamedTuple):
    """A layout as it was asked for; each argument is checked.

    Attributes:
        workers: the number of workers.
        backend: one of BACKENDS, or AUTO.
        lanes: the number of workers of a place; None if the devices decide.
        devices: all devices; None takes the most that fit.
        axes: names and sizes of the axes of the mesh within a worker.
        batch_axes: the axes over which a worker's part of a batch is cut.
    """

    workers: int
    backend: str
    lanes: int | None
    devices: tuple[Device, ...] | None
    axes: Axes
    batch_axes: tuple[str, ...]


def make_layout(workers: int, backend: str, placement: Placement) -> Layout:
    """Lays workers over devices.

    Args:
        workers: the number of workers, at least 1.
        backend: pmap, shard_map, vmap (one device), or auto, which takes pmap in one
            process if this jax has it, and shard_map otherwise.
        placement: its devices, lanes, mesh and batch_axes are used.

    With several processes, devices=None takes equally many devices of each process.

    Raises:
        ValueError: an argument is unknown, or devices or lanes do not divide the
            workers.
    """
    request = _check_arguments(workers, backend, placement)
    return _lay_out(request, request.devices or _choose_devices(request))


def _check_arguments(workers: int, backend: str, placement: Placement) -> Request:
    """Checks each argument alone, then those that exclude each other."""
    devices = placement.devices
    lanes = placement.lanes
    mesh = placement.mesh
    workers = checks.whole("workers", workers, least=1)
    checks.one_of("backend", backend, (AUTO, *BACKENDS))
    if backend == AUTO and mesh is not None:
        backend = "shard_map"
    if lanes is not None:
        lanes = checks.whole("lanes", lanes, least=1)
    chosen_devices = None if devices is None else _list_devices(devices)
    axes = ()
    if isinstance(mesh, Mesh):
        axes, chosen_devices = _split_mesh(mesh)
    elif mesh is not None:
        axes = _check_axes(mesh)
    if backend == "pmap" and not hasattr(jax, "pmap"):
        raise ValueError(
            f"backend 'pmap' is not available: jax {jax.__version__} has no jax.pmap; "
            "use 'shard_map', which gives the same numbers"
        )
    if lanes is not None and workers % lanes:
        raise ValueError(f"lanes must divide the {workers} workers, got {lanes}")
    if placement.batch_axes is not None and mesh is None:
        raise ValueError("batch_axes name axes of a mesh: pass mesh, too")
    if isinstance(mesh, Mesh) and devices is not None:
        raise ValueError("a Mesh holds its own devices: pass mesh or devices")
    if axes and backend != "shard_map":
        raise ValueError(f"mesh needs backend 'shard_map', got {backend!r}")
    batch_axes = _choose_batch_axes(placement.batch_axes, axes)
    return Request(workers, backend, lanes, chosen_devices, axes, batch_axes)


def _lay_out(request: Request, devices: tuple[Device, ...]) -> Layout:
    """Lays out the request over all these devices."""
    workers, backend, lanes, _, axes, batch_axes = request
    if backend == "vmap" and len(devices) > 1:
        raise ValueError(f"backend 'vmap' runs on one device, got {len(devices)}")
    places, left_devices = divmod(len(devices), _count_devices(axes))
    devices_text = f"{len(devices)} devices"
    if axes:
        mesh_text = f"meshes of {_count_devices(axes)} ({_format_axes(axes)})"
        devices_text = f"{len(devices)} devices in {mesh_text}"
    if left_devices or not places or workers % places:
        raise ValueError(f"{workers} workers do not divide over {devices_text}")
    needed_lanes = workers // places
    if lanes not in (None, needed_lanes):
        raise ValueError(
            f"{workers} workers on {devices_text} need lanes={needed_lanes}, got "
            f"{lanes}"
        )
    layout = Layout(backend, devices, needed_lanes, axes, batch_axes)
    _check_processes(layout)
    if backend != AUTO:
        return layout
    # Both are jit(shard_map) (docs/design.md). With several processes, pmap takes and
    # returns parts of arrays unless it is compiled ahead of time.
    takes_pmap = layout.processes == 1 and hasattr(jax, "pmap")
    return layout._replace(backend="pmap" if takes_pmap else "shard_map")


def _count_devices(axes: Axes) -> int:
    return math.prod(size for _, size in axes)


def _format_axes(axes: Axes) -> str:
    return ", ".join(f"{name} {size}" for name, size in axes)


def _split_mesh(mesh: Mesh) -> tuple[Axes, tuple[Device, ...]]:
    """Returns the axes within a worker of a user's mesh, and its devices by place."""
    names = [str(name) for name in mesh.axis_names]
    if DEVICES not in names:
        raise ValueError(
            f"mesh must have an axis {DEVICES!r} for the workers, got the axes "
            f"{', '.join(names)}"
        )
    device_grid = np.moveaxis(mesh.devices, names.index(DEVICES), 0)
    inner_sizes = [(name, mesh.shape[name]) for name in names if name != DEVICES]
    return _check_axes(dict(inner_sizes)), tuple(device_grid.flat)


def _check_axes(mesh: Any) -> Axes:
    """Returns the axes within a worker that a user gave, after checks."""
    if not isinstance(mesh, Mapping) or not mesh:
        raise ValueError(
            "mesh must be a jax.sharding.Mesh, or the sizes of the axes within a "
            f"worker, such as {{'fsdp': 2}}, got {checks.shown(mesh)}"
        )
    for name, size in mesh.items():
        if not isinstance(name, str) or name in (DEVICES, LANES):
            raise ValueError(f"mesh: an axis within a worker cannot be named {name!r}")
        checks.whole(f"mesh: {name}", size, least=1)
    return tuple((name, int(size)) for name, size in mesh.items())


def default_batch_axes(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the axes of a mesh over which a batch is cut by default."""
    return tuple(name for name in names if name not in TENSOR_AXES)


def _choose_batch_axes(batch_axes: Sequence[str] | None, axes: Axes) -> tuple[str, ...]:
    """Returns the axes over which a worker's batch is cut."""
    names = [name for name, _ in axes]
    if batch_axes is None:
        return default_batch_axes(names)
    batch_axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    for name in batch_axes:
        checks.one_of("axis in batch_axes,", name, names)
    if len(set(batch_axes)) != len(batch_axes):
        raise ValueError(f"batch_axes must be distinct, got {batch_axes}")
    return batch_axes


def _choose_devices(request: Request) -> tuple[Device, ...]:
    """Takes the most devices that divide the workers, or as many as the lanes need."""
    workers, backend, lanes, _, axes, _ = request
    # All devices, in one list for each process.
    groups = groupby(sorted(jax.devices(), key=_process_index), _process_index)
    process_devices = [list(devices) for _, devices in groups]
    place_devices = _count_devices(axes)
    if backend == "vmap" and len(process_devices) > 1:
        raise ValueError(
            "backend 'vmap' runs on one device, but there are "
            f"{len(process_devices)} processes: use pmap or shard_map"
        )
    if min(map(len, process_devices)) < place_devices:  # workers span processes
        process_devices = [list(chain.from_iterable(process_devices))]
    # Otherwise, each process has equally many whole workers.
    num_processes = len(process_devices)
    if workers % num_processes:
        raise ValueError(
            f"{workers} workers do not divide over {num_processes} processes: use a "
            f"multiple of {num_processes}"
        )
    max_places = 1
    if backend != "vmap":
        process_places = min(map(len, process_devices)) // place_devices
        max_places = process_places * num_processes
    if lanes is None:
        num_places = _find_largest_divisor(workers, max_places, num_processes)
    else:
        num_places = workers // lanes
        if num_places > max_places or num_places % num_processes:
            num_places = None
    if num_places is None:
        needed_places = num_processes if lanes is None else workers // lanes
        workers_text = f"{workers} workers"
        if lanes is not None:
            workers_text += f" in {lanes} lanes"
        if axes:
            workers_text += f" of {place_devices} devices ({_format_axes(axes)})"
        needed_text = f"{place_devices * needed_places} devices"
        if num_processes > 1:
            needed_text += ", equally many of each process"
        num_devices = sum(map(len, process_devices))
        if lanes is None:
            raise ValueError(
                f"{workers_text} need {needed_text}, but there are {num_devices}: use "
                "a smaller mesh"
            )
        if axes:
            raise ValueError(
                f"{workers_text} need {needed_text}, but there are {num_devices}: use "
                "fewer workers, more lanes or a smaller mesh"
            )
        raise ValueError(
            f"{workers_text} need {needed_text}, but there are {num_devices}: use "
            "fewer workers or more lanes"
        )
    devices_per_process = num_places // num_processes * place_devices
    chosen_devices: list[Device] = []
    for devices in process_devices:
        chosen_devices += devices[:devices_per_process]
    return tuple(chosen_devices)


def _find_largest_divisor(workers: int, largest: int, multiple: int) -> int | None:
    """Finds the largest divisor of the workers that is a multiple; None if none is."""
    for divisor in range(largest, 0, -1):
        if divisor % multiple == 0 and workers % divisor == 0:
            return divisor
    return None


def _list_devices(devices: Any) -> tuple[Device, ...]:
    """Returns the devices for a list of devices or indices."""
    if not isinstance(devices, Iterable) or isinstance(devices, str):
        raise ValueError(
            f"devices must be a list of indices or devices, got {devices!r}"
        )
    chosen_devices = tuple(_find_device(device) for device in devices)
    if len(set(chosen_devices)) != len(chosen_devices) or not chosen_devices:
        raise ValueError(f"devices must be distinct, at least one, got {devices!r}")
    return chosen_devices


def _check_processes(layout: Layout) -> None:
    """Raises a ValueError unless processes have equally many, contiguous places.

    A process may also have a part of a single place.
    """
    process_numbers = [device.process_index for device in layout.devices]
    place_owners = []  # the processes of each place
    for start in range(0, len(process_numbers), layout.devices_each):
        end = start + layout.devices_each
        place_owners.append(set(process_numbers[start:end]))
    if any(len(owners) > 1 for owners in place_owners):
        if len(set(process_numbers)) != sum(map(len, place_owners)):
            raise ValueError(
                "devices: a process must hold whole workers or a part of one worker, "
                f"got devices of processes {process_numbers}"
            )
        return
    stretches = [(number, len(list(run))) for number, run in groupby(process_numbers)]
    is_contiguous = len(dict(stretches)) == len(stretches)
    if not is_contiguous or len({count for _, count in stretches}) > 1:
        raise ValueError(
            "devices must be grouped by process, equally many of each process, got "
            f"devices of processes {process_numbers}"
        )
    if jax.process_index() not in process_numbers:
        raise ValueError(
            f"devices must include some of each process, got none of process "
            f"{jax.process_index()}"
        )


def _find_device(device: Any) -> Device:
    if isinstance(device, jax.Device):
        return device
    all_devices = jax.devices()
    number = checks.whole("a device", device, least=0)
    if number >= len(all_devices):
        names = ", ".join(str(i) for i in range(len(all_devices)))
        raise ValueError(f"device {number} does not exist (there are: {names})")
    return all_devices[number]
