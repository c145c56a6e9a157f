"""Lay workers over devices."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from syncalgos import checks
from syncalgos.engine.placement.layout import DEVICES, LANES, Device, Layout

BACKENDS = ("pmap", "shard_map", "vmap")
AUTO = "auto"
# Axes of these names cut the model's arithmetic, and not the batch.
TENSOR_AXES = ("tensor", "model", "tp")
_process_of = attrgetter("process_index")

AnyMesh = Mesh | Mapping[str, int]
Axes = tuple[tuple[str, int], ...]


def make_layout(
    workers: int,
    backend: str,
    devices: Sequence[Device | int] | None,
    lanes: int | None = None,
    mesh: AnyMesh | None = None,
    batch_axes: Sequence[str] | None = None,
    sync_memory: str | None = None,
) -> Layout:
    """Lays workers over devices.

    Args:
        workers: their number, at least 1.
        backend: pmap, shard_map, vmap (one device), or auto, which takes pmap in one
            process where this jax has it, and else shard_map.
        devices: devices or indices into `jax.devices()`, any subset in any order; None
            takes the largest number of devices that divides the workers.
        lanes: workers of a device; devices=None takes the first workers / lanes.
        mesh: the axes within a worker; None: a worker is a device.
        batch_axes: those over which a worker's batch is cut; None: all but
            TENSOR_AXES.
        sync_memory: where the strategy's arrays lie; not None takes shard_map.

    In several processes, devices=None takes as many of each.

    Raises:
        ValueError: an unknown argument, or devices or lanes that do not divide the
            workers.
    """
    workers = checks.whole("workers", workers, least=1)
    checks.one_of("backend", backend, (AUTO, *BACKENDS))
    if backend == AUTO and (mesh is not None or sync_memory is not None):
        backend = "shard_map"
    if backend == "pmap" and not _has_pmap():
        raise ValueError(
            f"backend 'pmap' is not there: jax {jax.__version__} has no jax.pmap; "
            "shard_map gives the same numbers"
        )
    if lanes is not None:
        lanes = checks.whole("lanes", lanes, least=1)
        if workers % lanes:
            raise ValueError(f"{lanes} lanes do not divide {workers} workers")
    if mesh is not None:
        if backend != "shard_map":
            raise ValueError(f"a mesh takes backend 'shard_map', got {backend!r}")
        return _of_meshes(workers, devices, lanes, mesh, batch_axes)
    if batch_axes is not None:
        raise ValueError("batch_axes are axes of a mesh, and there is none: give mesh")
    if devices is None:
        return _resolved(_widest(workers, backend, lanes))
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
    return _resolved(Layout(backend, chosen, workers // len(chosen)))


def _resolved(layout: Layout) -> Layout:
    """The layout with a backend in place of auto."""
    if layout.backend != AUTO:
        return layout
    # Both are jit(shard_map) (docs/design.md). In several processes pmap takes and
    # returns parts of arrays, unless it is compiled ahead of time.
    takes_pmap = layout.processes == 1 and _has_pmap()
    return layout._replace(backend="pmap" if takes_pmap else "shard_map")


def _has_pmap() -> bool:
    return hasattr(jax, "pmap")


def _of_meshes(
    workers: int,
    devices: Sequence[Device | int] | None,
    lanes: int | None,
    mesh: AnyMesh,
    batch_axes: Sequence[str] | None,
) -> Layout:
    """Lays workers over as many devices each as the mesh within a worker has."""
    if isinstance(mesh, Mesh):
        if devices is not None:
            raise ValueError("a mesh has its devices: leave out devices")
        axes, chosen = _taken_apart(mesh)
    else:
        axes = _checked_axes(mesh)
        chosen = None if devices is None else _chosen(devices)
    each = math.prod(size for _, size in axes)
    if chosen is None:
        chosen = _needed(workers, lanes, axes, each)
    places = len(chosen) // each
    fits = places * each == len(chosen) and workers % max(1, places) == 0
    if not fits or lanes not in (None, workers // places):
        in_lanes = "" if lanes is None else f" in {lanes} lanes"
        raise ValueError(
            f"{workers} workers{in_lanes} do not divide over {len(chosen)} devices in "
            f"meshes of {each} ({_shown(axes)})"
        )
    spread = _batch_axes(batch_axes, axes)
    layout = Layout("shard_map", chosen, workers // places, axes, spread)
    _check_whole_processes(layout)
    return layout


def _needed(
    workers: int, lanes: int | None, axes: Axes, each: int
) -> tuple[Device, ...]:
    """Takes as many of all devices as workers in meshes of so many need."""
    known = _by_process()
    # As many whole workers of each process; or else a worker spans some.
    step = len(known) if min(map(len, known)) >= each else 1
    most = min(map(len, known)) // each * step
    if step == 1:
        most = sum(map(len, known)) // each
    counts = range(most, 0, -1) if lanes is None else [workers // lanes]
    fits = [n for n in counts if n <= most and n % step == 0 and workers % n == 0]
    if not fits:
        in_lanes, fewer = "", "a smaller mesh"
        if lanes is not None:
            in_lanes = f" in {lanes} lanes"
            fewer = "fewer workers, more lanes or a smaller mesh"
        needed = each * (step if lanes is None else workers // lanes)
        raise ValueError(
            f"{workers} workers{in_lanes} of {each} devices ({_shown(axes)}) need "
            f"{needed} devices, and there are {sum(map(len, known))}: take {fewer}"
        )
    if step == 1:
        return tuple(d for devices in known for d in devices)[: fits[0] * each]
    return tuple(d for devices in known for d in devices[: fits[0] // step * each])


def _shown(axes: Axes) -> str:
    return ", ".join(f"{name} {size}" for name, size in axes)


def _taken_apart(mesh: Mesh) -> tuple[Axes, tuple[Device, ...]]:
    """The axes within a worker of a user's mesh, and its devices, place by place."""
    names = [str(name) for name in mesh.axis_names]
    if DEVICES not in names:
        raise ValueError(
            f"a mesh must have the axis {DEVICES!r}, over which the workers lie, got "
            f"{', '.join(names)}"
        )
    grid = np.moveaxis(mesh.devices, names.index(DEVICES), 0)
    inner = [(name, mesh.shape[name]) for name in names if name != DEVICES]
    return _checked_axes(dict(inner)), tuple(grid.flat)


def _checked_axes(mesh: Any) -> Axes:
    """The axes within a worker, as a user gives them."""
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
    """Returns those of a mesh's axes over which a batch is cut if nobody says so."""
    return tuple(name for name in names if name not in TENSOR_AXES)


def _batch_axes(given: Sequence[str] | None, axes: Axes) -> tuple[str, ...]:
    """The axes over which a worker's batch is cut."""
    names = [name for name, _ in axes]
    if given is None:
        return default_batch_axes(names)
    given = (given,) if isinstance(given, str) else tuple(given)
    for name in given:
        checks.one_of("axis in batch_axes,", name, names)
    if len(set(given)) != len(given):
        raise ValueError(f"batch_axes must be distinct, got {given}")
    return given


def _check_whole_processes(layout: Layout) -> None:
    """Raises a ValueError unless places divide over processes, or the reverse."""
    devices, each = layout.devices, layout.devices_each
    grouped = [[*devices[i : i + each]] for i in range(0, len(devices), each)]
    owners = [{_process_of(d) for d in place} for place in grouped]
    if all(len(x) == 1 for x in owners):
        _check_processes(tuple(place[0] for place in grouped))
    elif len({p for x in owners for p in x}) != sum(map(len, owners)):
        raise ValueError(
            "a process must have whole workers, or a part of one worker alone, got "
            f"devices of processes {[d.process_index for d in devices]}"
        )


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
    known = _by_process()
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


def _by_process() -> list[list[Device]]:
    """All devices, those of each process in a list."""
    by_process = groupby(sorted(jax.devices(), key=_process_of), _process_of)
    return [[*devices] for _, devices in by_process]


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
