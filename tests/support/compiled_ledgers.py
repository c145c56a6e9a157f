"""Compiles algorithms for a machine, and reads what their steps send across workers.

A program of its own, as compilers want their environment before jax starts:

    PYTHONPATH=.:tests python -m support.compiled_ledgers OUT.json tpu:v5e:2x4 \
        SLICES WORKERS bmuf topk_sgd …
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

from experiments.aim import targets

TARGET = targets.parse_target(sys.argv[2], int(sys.argv[3]))
os.environ.update(targets.compiler_environment(TARGET))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

import syncalgos  # noqa: E402
from experiments.aim import hlo, times  # noqa: E402
from experiments.training.sends import device_bytes  # noqa: E402
from support import mesh_training  # noqa: E402
from support.placements import placed  # noqa: E402
from support.requirements import owed  # noqa: E402

SHAPES = {"bias": (256,), "in": (128, 256), "out": (256, 128), "stack": (2, 128, 128)}


def shapes():
    """Params of some tiles of a TPU, and batches."""
    params = {k: jax.ShapeDtypeStruct(v, np.float32) for k, v in SHAPES.items()}
    batch = jax.ShapeDtypeStruct((mesh_training.STEPS, 128, 128), np.float32)
    return params, {"x": batch, "y": batch}


def make_trainer(name, workers, devices):
    """A trainer of so many workers on these devices, meshes if they are fewer."""
    devices_each = len(devices) // workers
    placement_options = {"devices": devices}
    if devices_each > 1:
        grid = np.array(devices).reshape(workers, devices_each)
        axes = {"fsdp": devices_each}
        placement_options = {
            "mesh": Mesh(grid, ("devices", *axes)),
            "shardings": mesh_training.rule(axes),
        }
    return syncalgos.DataParallel(
        syncalgos.stateless(mesh_training.loss),
        owed(name).optimizer,
        mesh_training.algorithm(name),
        workers=workers,
        backend="shard_map",
        **placed(placement_options),
    )


def compared(name, workers, devices):
    """Sends of one algorithm by kind: as counted, and as compiled.

    Returns:
        Bytes and calls of a device; when and over which networks they go; the state's
        bytes on a device, and of these those that a step changes in place.
    """
    trainer = make_trainer(name, workers, devices)
    lowered = trainer.lower(*shapes())
    compiled = lowered.program.compile()
    collectives = hlo.find_collectives(compiled.as_text())
    devices_each = trainer.layout.devices_each
    sent_bytes = Counter()
    calls = Counter()
    for collective in collectives:
        crosses_workers = collective.slices
        for group in collective.groups:
            workers_of_group = {device // devices_each for device in group}
            crosses_workers = crosses_workers or len(workers_of_group) > 1
        if not crosses_workers or not collective.is_looped:
            continue
        sent_bytes[collective.kind] += float(collective.bytes * collective.times)
        calls[collective.kind] += collective.times
    rows = times.traffic(collectives, devices, devices_each)
    rows = [x for x in rows if x.scope == times.ACROSS]
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "counted": mesh_training.counted(trainer, lowered.state),
        "counted_calls": mesh_training.counted(trainer, lowered.state, "calls"),
        "sent": sent_bytes,
        "calls": calls,
        "when": sorted({x.when for x in rows} - {times.DISPATCH}),
        "networks": sorted({x.network for x in rows}),
        "aliased": memory.alias_size_in_bytes,
        "state": sum(device_bytes(lowered.state).values()),
    }


def main(out, target, slices, workers, *names):
    """Writes what was found of each algorithm as JSON."""
    devices = targets.devices(TARGET)
    ledgers = {name: compared(name, int(workers), devices) for name in names}
    Path(out).write_text(json.dumps(ledgers))


if __name__ == "__main__":
    main(*sys.argv[1:])
