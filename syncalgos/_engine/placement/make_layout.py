"""Lays workers over devices."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
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
_process_of = attrgetter("process_index")

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
    request = _requested(workers, backend, placement)
    return _fit(request, request.devices or _widest(request))


def _requested(workers: int, backend: str, placement: Placement) -> Request:
    """Checks each argument alone, then those that exclude each other."""
    devices, lanes, mesh = placement.devices, placement.lanes, placement.mesh
    workers = checks.whole("workers", workers, least=1)
    checks.one_of("backend", backend, (AUTO, *BACKENDS))
    if backend == AUTO and mesh is not None:
        backend = "shard_map"
    if lanes is not None:
        lanes = checks.whole("lanes", lanes, least=1)
    chosen, axes = None if devices is None else _chosen(devices), ()
    if isinstance(mesh, Mesh):
        axes, chosen = _taken_apart(mesh)
    elif mesh is not None:
        axes = _checked_axes(mesh)
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
    batch_axes = _batch_axes(placement.batch_axes, axes)
    return Request(workers, backend, lanes, chosen, axes, batch_axes)


def _fit(request: Request, devices: tuple[Device, ...]) -> Layout:
    """Lays out the request over all these devices."""
    workers, backend, lanes, _, axes, batch_axes = request
    if backend == "vmap" and len(devices) > 1:
        raise ValueError(f"backend 'vmap' runs on one device, got {len(devices)}")
    places, left_devices = divmod(len(devices), _size(axes))
    shown_devices = f"{len(devices)} devices"
    if axes:
        shown_devices = (
            f"{len(devices)} devices in meshes of {_size(axes)} ({_shown(axes)})"
        )
    if left_devices or not places or workers % places:
        raise ValueError(f"{workers} workers do not divide over {shown_devices}")
    needed_lanes = workers // places
    if lanes not in (None, needed_lanes):
        raise ValueError(
            f"{workers} workers on {shown_devices} need lanes={needed_lanes}, got "
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


def _size(axes: Axes) -> int:
    return math.prod(size for _, size in axes)


def _shown(axes: Axes) -> str:
    return ", ".join(f"{name} {size}" for name, size in axes)


def _taken_apart(mesh: Mesh) -> tuple[Axes, tuple[Device, ...]]:
    """Returns the axes within a worker of a user's mesh, and its devices by place."""
    names = [str(name) for name in mesh.axis_names]
    if DEVICES not in names:
        raise ValueError(
            f"mesh must have an axis {DEVICES!r} for the workers, got the axes "
            f"{', '.join(names)}"
        )
    grid = np.moveaxis(mesh.devices, names.index(DEVICES), 0)
    inner = [(name, mesh.shape[name]) for name in names if name != DEVICES]
    return _checked_axes(dict(inner)), tuple(grid.flat)


def _checked_axes(mesh: Any) -> Axes:
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


def _batch_axes(given: Sequence[str] | None, axes: Axes) -> tuple[str, ...]:
    """Returns the axes over which a worker's batch is cut."""
    names = [name for name, _ in axes]
    if given is None:
        return default_batch_axes(names)
    given = (given,) if isinstance(given, str) else tuple(given)
    for name in given:
        checks.one_of("axis in batch_axes,", name, names)
    if len(set(given)) != len(given):
        raise ValueError(f"batch_axes must be distinct, got {given}")
    return given


def _widest(request: Request) -> tuple[Device, ...]:
    """Takes the most devices that divide the workers, or as many as the lanes need."""
    workers, backend, lanes, _, axes, _ = request
    # All devices, in one list for each process.
    by_process = groupby(sorted(jax.devices(), key=_process_of), _process_of)
    known, each = [[*devices] for _, devices in by_process], _size(axes)
    if backend == "vmap" and len(known) > 1:
        raise ValueError(
            f"backend 'vmap' runs on one device, but there are {len(known)} processes: "
            "use pmap or shard_map"
        )
    if min(map(len, known)) < each:
        known = [[d for devices in known for d in devices]]  # workers span processes
    # Otherwise, each process has equally many whole workers.
    step = len(known)
    if workers % step:
        raise ValueError(
            f"{workers} workers do not divide over {step} processes: use a multiple of "
            f"{step}"
        )
    most = 1 if backend == "vmap" else min(map(len, known)) // each * step
    counts = range(most, 0, -1) if lanes is None else [workers // lanes]
    fits = [n for n in counts if n <= most and n % step == 0 and workers % n == 0]
    if not fits:
        places = step if lanes is None else workers // lanes
        asked = f"{workers} workers"
        if lanes is not None:
            asked += f" in {lanes} lanes"
        if axes:
            asked += f" of {each} devices ({_shown(axes)})"
        needed = f"{each * places} devices"
        if step > 1:
            needed += ", equally many of each process"
        count = sum(map(len, known))
        if lanes is None:
            raise ValueError(
                f"{asked} need {needed}, but there are {count}: use a smaller mesh"
            )
        if axes:
            raise ValueError(
                f"{asked} need {needed}, but there are {count}: use fewer workers, "
                "more lanes or a smaller mesh"
            )
        raise ValueError(
            f"{asked} need {needed}, but there are {count}: use fewer workers or more "
            "lanes"
        )
    return tuple(d for devices in known for d in devices[: fits[0] // step * each])


def _chosen(devices: Any) -> tuple[Device, ...]:
    """Returns the devices for a list of devices or indices."""
    if not isinstance(devices, Iterable) or isinstance(devices, str):
        raise ValueError(
            f"devices must be a list of indices or devices, got {devices!r}"
        )
    chosen = tuple(_device(device) for device in devices)
    if len(set(chosen)) != len(chosen) or not chosen:
        raise ValueError(f"devices must be distinct, at least one, got {devices!r}")
    return chosen


def _check_processes(layout: Layout) -> None:
    """Raises a ValueError unless processes have equally many, contiguous places.

    A process may also have a part of a single place.
    """
    devices, each = layout.devices, layout.devices_each
    numbers = [device.process_index for device in devices]
    owners = [{*numbers[i : i + each]} for i in range(0, len(numbers), each)]
    if any(len(x) > 1 for x in owners):
        if len({*numbers}) != sum(map(len, owners)):
            raise ValueError(
                "devices: a process must hold whole workers or a part of one worker, "
                f"got devices of processes {numbers}"
            )
        return
    stretches = [(p, len([*same])) for p, same in groupby(numbers)]
    once = len(dict(stretches)) == len(stretches)
    if not once or len({count for _, count in stretches}) > 1:
        raise ValueError(
            "devices must be grouped by process, equally many of each process, got "
            f"devices of processes {numbers}"
        )
    if jax.process_index() not in numbers:
        raise ValueError(
            f"devices must include some of each process, got none of process "
            f"{jax.process_index()}"
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
