"""Trains algorithms on workers that are meshes, and on workers that are not.

A program of its own, as it needs eight devices:

    PYTHONPATH=.:tests python -m support.mesh_training OUT.npz 2x4 bmuf topk_sgd …
"""

import itertools
import json
import math
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import syncalgos
from experiments.aim import hlo
from support.placements import placed
from support.requirements import PERIOD, make, owed
from support.trees import largest
from syncalgos._engine.worker import RUN

STEPS = 2 * PERIOD
DEVICES = 8
# By name: workers, lanes, axes within a worker.
LAYOUTS = {
    "4x2": (4, 1, {"fsdp": 2}),
    "2x4": (2, 1, {"fsdp": 4}),
    "2x(2x2)": (2, 1, {"fsdp": 2, "tensor": 2}),
    "1x8": (1, 1, {"fsdp": 8}),
    "2x2x2": (4, 2, {"fsdp": 4}),
}
# Their reducers act on each shard, as if it were a leaf of its own.
ON_SHARDS = {"choco_sgd", "demo", "dgc", "dion", "distributed_lion", "ef21"}
ON_SHARDS |= {"loco", "one_bit_adam", "quantized_sgd", "sign_sgd", "signum"}
ON_SHARDS |= {"pulseloco", "sparseloco", "sparta", "topk_sgd", "zero_one_adam"}
# First factors are drawn by the leaf's number; at full rank the mean is exact.
LOW_RANK = {"powersgd", "diloco_x"}
# They decide the steps at any rank: those of all shards are begun alike.
FROM_FACTORS = {"dion"}


def model():
    """Params whose shapes eight devices divide, and batches."""
    rng = np.random.default_rng(0)
    shapes = {"bias": (16,), "in": (8, 16), "out": (16, 8), "stack": (2, 8, 8)}
    params = {name: rng.normal(size=shape) / 3 for name, shape in shapes.items()}
    batches = {name: rng.normal(size=(STEPS, 32, 8)) for name in ("x", "y")}
    return jax.tree.map(np.float32, (params, batches))


def loss(params, batch):
    """The squared error of a small network."""
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"]) @ params["out"]
    for layer in (0, 1):
        hidden = hidden + jnp.tanh(hidden @ params["stack"][layer])
    return jnp.mean((hidden - batch["y"]) ** 2)


# They draw numbers for all leaves that are cut over the same axes at once.
DRAWING = {"distributed_lion", "quantized_sgd", "signum", "sparta"}


def rule(axes, name=""):
    """The specs for axes within a worker, for the algorithm of a name."""
    if "tensor" in axes and name in DRAWING:
        joint_axes = ("fsdp", "tensor")
        specs = {
            "in": P(*joint_axes),
            "out": P(*joint_axes),
            "stack": P(None, *joint_axes),
        }
        return {**specs, "bias": P(joint_axes)}
    if "tensor" in axes:
        specs = {"in": P("fsdp", "tensor"), "out": P("tensor", "fsdp")}
        return {**specs, "bias": P("tensor"), "stack": P(None, "fsdp", "tensor")}
    matrices = {"in": P(None, "fsdp"), "out": P("fsdp"), "stack": P(None, None, "fsdp")}
    # Of an array that is whole on each device XLA may send a part from each.
    return {**matrices, "bias": P("fsdp")}


def cut(x, spec, axes):
    """The shards of an array, in order."""
    over = [*spec, *[None] * x.ndim][: x.ndim]
    slices_by_axis = []
    for length, names in zip(x.shape, over, strict=True):
        parts = math.prod(axes.get(name, 1) for name in jax.tree.leaves(names))
        size = length // parts
        slices_by_axis.append([slice(i * size, (i + 1) * size) for i in range(parts)])
    places = [*itertools.product(*slices_by_axis)]
    return places, [x[place] for place in places]


def in_pieces(params, axes, specs):
    """The model with a leaf for each shard, and a function that joins them."""
    cuts = {name: cut(x, specs[name], axes) for name, x in params.items()}

    # All leaves of a device follow one another, as do the numbers that it draws.
    def key(name, shard):
        return f"{shard:02} {name}"

    def join(pieces):
        joined_params = {
            name: jnp.zeros(x.shape, x.dtype) for name, x in params.items()
        }
        for name, (places, _) in cuts.items():
            for shard, place in enumerate(places):
                joined_params[name] = (
                    joined_params[name].at[place].set(pieces[key(name, shard)])
                )
        return joined_params

    pieces_by_key = {}
    for name, (_, pieces) in cuts.items():
        for shard, piece in enumerate(pieces):
            pieces_by_key[key(name, shard)] = piece
    return pieces_by_key, join


def algorithm(name):
    """The algorithm, as it is compared."""
    if name in FROM_FACTORS:
        return begun_alike(make(name))
    if name not in LOW_RANK:
        return make(name)
    return make(name, rank=16, min_rate=0)


def begun_alike(strategy):
    """The strategy, with the first columns of the identity for first factors."""

    def make_first_factor(q):
        return jnp.broadcast_to(jnp.eye(*q.shape[-2:]), q.shape)

    def init(params):
        state = strategy.init(params)
        return state._replace(factors=jax.tree.map(make_first_factor, state.factors))

    return strategy._replace(init=init)


def _keep(params):
    return params


def trained(name, layout, on_mesh):
    """The trainer and its state after STEPS steps, and the params of all workers."""
    workers, lanes, axes = LAYOUTS[layout]
    params, batches = model()
    specs = rule(axes, name)
    strategy = algorithm(name)
    join = _keep
    if on_mesh:
        placement_options = {"mesh": axes, "shardings": specs, "lanes": lanes}
    else:
        placement_options = {"devices": range(min(workers, DEVICES))}
        if name in ON_SHARDS:
            params, join = in_pieces(params, axes, specs)
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(lambda params, batch: loss(join(params), batch)),
        owed(name).optimizer,
        strategy,
        workers=workers,
        backend="shard_map",
        **placed(placement_options),
    )
    state, metrics = trainer.run(trainer.init(params), batches)
    worker_params = jax.vmap(join)(trainer.to_host(state).replica.params)
    center = join(jax.tree.map(np.asarray, trainer.center(state).params))
    losses = np.asarray(trainer.evaluate(state, batches)["loss"])
    return (
        trainer,
        state,
        jax.tree.map(np.asarray, (worker_params, center, metrics, losses)),
    )


def counted(trainer, state, quantity="bytes"):
    """Counts what the ledger finds that one device sends, by kind: bytes, or calls."""
    program_sends = trainer.program_sends(state)
    index = ("bytes", "calls").index(quantity)
    totals = Counter()
    for sends_by_kind in (program_sends.always, program_sends.branched):
        for kind, counts in sends_by_kind.items():
            totals[kind] += counts[index]
    return {kind: float(total) for kind, total in totals.items()}


def compiled(trainer):
    """Reads what the compiled local steps send between workers.

    Returns:
        The bytes by kind; whether all groups are of peers; whether all are in branches;
        and the kinds that a worker's devices send each other.
    """
    [text] = [
        program.as_text()
        for key, program in trainer._compiled.programs.items()
        if key.program is RUN
    ]
    collectives = hlo.find_collectives(text)
    devices_each = trainer.layout.devices_each
    bytes_by_kind = Counter()
    peers = True
    branched = True
    within = set()
    for collective in collectives:
        crosses_workers = False
        is_of_peers = True
        for group in collective.groups:
            workers_of_group = {device // devices_each for device in group}
            places_in_workers = {device % devices_each for device in group}
            crosses_workers = crosses_workers or len(workers_of_group) > 1
            is_of_peers = is_of_peers and len(places_in_workers) == 1
        if not crosses_workers:
            within.add(collective.kind)
        # Metrics are averaged once, after all steps.
        if not crosses_workers or not collective.is_looped:
            continue
        bytes_by_kind[collective.kind] += collective.bytes
        peers = peers and is_of_peers
        branched = branched and bool(collective.choices)
    return (
        {kind: float(n) for kind, n in bytes_by_kind.items()},
        peers,
        branched,
        within,
    )


def compared(name, layout):
    """All that the tests look at, of one algorithm."""
    trainer, state, meshed = trained(name, layout, True)
    _, _, plain = trained(name, layout, False)
    sent_bytes, peers, branched, within = compiled(trainer)
    return {
        "apart": [largest(*pair) for pair in zip(meshed, plain, strict=True)],
        "moved": largest(meshed[1], model()[0]),
        "counted": counted(trainer, state) if trainer.layout.lanes == 1 else None,
        "sent": sent_bytes,
        "peers": peers,
        "branched": branched,
        "within": sorted(within),
    }


def main(out, layout, *names):
    """Writes what was found of each algorithm as JSON."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    Path(out).write_text(json.dumps({name: compared(name, layout) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
