"""Trains algorithms in a loop that stacks its replicas, and in the engine.

A program of its own, as it needs eight devices:

    PYTHONPATH=.:tests python -m support.stacked_loops OUT.json bmuf topk_sgd …
"""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import syncalgos
from support.requirements import PERIOD, make, owed
from support.trees import largest
from syncalgos import Replica

STEPS = 2 * PERIOD
WORKERS = 4
SPECS = {"bias": P("fsdp"), "in": P(None, "fsdp"), "out": P("fsdp"), "scale": P()}
SHAPES = {"bias": (16,), "in": (8, 16), "out": (16, 8), "scale": ()}


def numbers():
    """Params, and batches (steps, global batch, 16)."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape) / 3 for name, shape in SHAPES.items()}
    return params, rng.normal(size=(STEPS, 8 * WORKERS, 16))


def loss(params, batch):
    """The squared error of a small network."""
    hidden = jnp.tanh(batch[:, :8] @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] * params["scale"] - batch[:, 8:]) ** 2)


def in_a_loop(name, mesh, by_shard_map):
    """Replicas and center of a loop over stacked arrays, donated."""
    params, batches = numbers()
    optimizer = owed(name).optimizer
    spmd = mesh and "diloco"
    strategy = make(name, axis="diloco")
    strategy = syncalgos.stacked(strategy, mesh if by_shard_map else None)
    mapped = partial(jax.vmap, spmd_axis_name=spmd)  # the framework's

    def local_step(carry, batch):
        replica, state, step = carry
        losses, grads = mapped(jax.value_and_grad(loss))(replica.params, batch)
        replica = replica._replace(loss=losses)
        grads, state = strategy.reduce(grads, replica, state, step)
        updates, opt_state = mapped(optimizer.update)(
            grads, replica.opt_state, replica.params
        )
        params = optax.apply_updates(replica.params, updates)
        replica = replica._replace(params=params, opt_state=opt_state)
        replica, state = strategy.sync(replica, state, step)
        return (replica, state, step + 1), None

    stacked = {name: jnp.stack([x] * WORKERS) for name, x in params.items()}
    if mesh:
        cuts = {k: NamedSharding(mesh, P("diloco", *x)) for k, x in SPECS.items()}
        stacked = jax.device_put(stacked, cuts)
    replica = Replica(stacked, mapped(optimizer.init)(stacked))
    carry = jax.block_until_ready((replica, strategy.init(stacked), jnp.int32(0)))
    if mesh:  # cut as params are, and not whole on each device
        for x in jax.tree.leaves(carry[1]):
            assert x.sharding.spec[:1] == ("diloco",), x.sharding
    batches = batches.reshape(STEPS, WORKERS, 8, 16)
    train = jax.jit(partial(jax.lax.scan, local_step), donate_argnums=0)
    # Two programs at once may wait for each other's devices on a CPU.
    (replica, state, _), _ = jax.block_until_ready(train(carry, batches))
    return jax.device_get((replica.params, strategy.center(replica.params, state)))


def in_the_engine(name):
    """The same of `DataParallel`."""
    params, batches = numbers()
    trainer = syncalgos.DataParallel(
        loss, owed(name).optimizer, make(name), workers=WORKERS, backend="vmap"
    )
    state, _ = trainer.run(trainer.init(params), batches)
    params = trainer.to_host(state).replica.params
    return jax.device_get((params, trainer.center(state).params))


def compared(name):
    """The differences from the engine, and how far the params moved."""
    mesh = jax.make_mesh(
        (WORKERS, 2), ("diloco", "fsdp"), axis_types=(AxisType.Auto,) * 2
    )
    engine_run = in_the_engine(name)
    ways = {
        "unsharded": in_a_loop(name, None, False),
        "vmap": in_a_loop(name, mesh, False),
        "shard_map": in_a_loop(name, mesh, True),
    }
    differences = {way: largest(loop_run, engine_run) for way, loop_run in ways.items()}
    return {"apart": differences, "moved": largest(engine_run[1], numbers()[0])}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2 * WORKERS)
    jax.config.update("jax_enable_x64", True)
    out, *names = sys.argv[1:]
    Path(out).write_text(json.dumps({name: compared(name) for name in names}))
