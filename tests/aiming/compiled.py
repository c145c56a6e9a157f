"""Compiles a small model's local steps for a target, and writes its traffic as JSON.

A program of its own, as a process has the devices of one target:

    python tests/aiming/compiled.py cpu:8 1 2 bmuf gossip …
"""

import json
import os
import sys

from experiments.aiming import compiler, hlo, targets, traffic

SIZE, LAYERS, STEPS = 256, 4, 8


def rows(target, each, name):
    """The rows of traffic of an algorithm, with workers of so many devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, Mesh, PartitionSpec

    import syncalgos
    from syncalgos.engine import ahead

    devices = targets.devices(target)
    workers = len(devices) // each
    mesh = Mesh(
        np.array(devices).reshape(workers, each),
        ("devices", "fsdp"),
        axis_types=(AxisType.Auto,) * 2,
    )

    def loss(params, batch):
        def layer(x, weights):
            return jnp.tanh(x @ weights), None

        out, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.mean((out - batch["y"]) ** 2)

    trainer = syncalgos.DataParallel(
        syncalgos.stateless(loss),
        optax.adam(1e-3),
        getattr(syncalgos, name)(),
        workers=workers,
        backend="shard_map",
        placement=syncalgos.Placement(mesh=mesh, shardings=PartitionSpec(None, "fsdp")),
    )
    params = jax.ShapeDtypeStruct((LAYERS, SIZE, SIZE), jnp.float32)
    batch = jax.ShapeDtypeStruct((STEPS, 2 * len(devices), SIZE), jnp.float32)
    lowered = ahead.lower(trainer, params, {"x": batch, "y": batch})
    program = hlo.read(compiler.compiled(lowered.program).text)
    assert program.steps == STEPS
    return traffic.traffic(program, devices, each)


def main(text, slices, each, *names):
    target = targets.parse(text, int(slices))
    os.environ.update(targets.environment(target))
    print(json.dumps({name: rows(target, int(each), name) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
