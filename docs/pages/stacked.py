"""Makes the table of docs/tables/stacked.txt from compiled programs.

python -m pages.stacked             writes the table
python -m pages.stacked bmuf easgd  prints the rows of these
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import syncalgos
from experiments.aim import hlo
from pages import table, traffic

PAGE = Path(__file__).parents[1] / "tables" / "stacked.txt"
HEAD = "algorithm", "vmap", "within", "shard_map", "within", "map by"
WORKERS = 4
SHARDS = 2
SHAPES = {"up": (256, 1024), "down": (1024, 256), "bias": (1024,)}
CUTS = {"up": (None, "fsdp"), "down": ("fsdp", None), "bias": ("fsdp",)}


def filled(page: str) -> str:
    """Returns the text of the page with the table between its marks."""
    lines = [HEAD, ("---",) * len(HEAD), *map(row, syncalgos.ALGORITHMS)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table.MARKED.sub(lambda _: text, page)


def row(name: str) -> Sequence[str]:
    """Returns the cells of an algorithm."""
    make = syncalgos.ALGORITHMS[name]
    rate = {"learning_rate": 0.1} if traffic.needs_rate(make) else {}
    strategy = make(axis="diloco", **rate)
    by_vmap = count_bytes(strategy, None)
    by_shard_map = count_bytes(strategy, mesh())
    ratio = by_vmap.across / by_shard_map.across
    best = "either"
    if ratio > 1.1:
        best = "shard_map"
    elif ratio < 1 / 1.1:
        best = "vmap"
    numbers = [f"{x / 1024:,.0f}" for x in (*by_vmap, *by_shard_map)]
    return f"`{name}`", *numbers, best


class DeviceBytes(NamedTuple):
    """The bytes that a device sends to other workers, and within its worker."""

    across: float
    within: float


def count_bytes(
    strategy: syncalgos.Strategy, over: jax.sharding.Mesh | None
) -> DeviceBytes:
    """Counts the bytes of a device in the compiled step of a strategy."""
    mapped = syncalgos.stacked(strategy, over)
    params = {
        name: jax.device_put(
            jnp.zeros((WORKERS, *shape)),
            NamedSharding(mesh(), PartitionSpec("diloco", *CUTS[name])),
        )
        for name, shape in SHAPES.items()
    }

    def step_and_sync(grads: Any, replica: Any, state: Any, step: jax.Array) -> Any:
        replica = replica._replace(loss=jnp.zeros(WORKERS))
        grads, state = mapped.reduce(grads, replica, state, step)
        moved = jax.tree.map(jnp.subtract, replica.params, grads)
        return mapped.sync(replica._replace(params=moved), state, step)

    count = jnp.zeros(WORKERS, jnp.int32)
    adam = optax.ScaleByAdamState(count, params, params)
    replica = syncalgos.Replica(params, adam)
    arguments = (params, replica, mapped.init(params), jnp.int32(0))
    with jax.set_mesh(mesh()):
        text = jax.jit(step_and_sync).lower(*arguments).compile().as_text()
    across = []
    within = []
    for collective in hlo.find_collectives(text or ""):
        (across if crosses_workers(collective) else within).append(collective)
    return DeviceBytes(largest_bytes(across), largest_bytes(within))


def crosses_workers(collective: hlo.Collective) -> bool:
    """Says whether a group of a collective has devices of several workers."""
    for group in collective.groups:
        if len({device // SHARDS for device in group}) > 1:
            return True
    return False


def largest_bytes(collectives: Iterable[hlo.Collective], depth: int = 0) -> float:
    """Returns the bytes of the collectives, of each conditional's larger branch."""
    total = 0.0
    conditionals = defaultdict(lambda: defaultdict(list))
    for collective in collectives:
        if len(collective.choices) == depth:
            total += float(collective.bytes * collective.times)
        else:
            conditional, branch = collective.choices[depth]
            conditionals[conditional][branch].append(collective)
    for branches in conditionals.values():
        total += max(largest_bytes(branch, depth + 1) for branch in branches.values())
    return total


def mesh() -> jax.sharding.Mesh:
    """Returns the mesh of the programs."""
    sizes = (WORKERS, SHARDS)
    names = ("diloco", "fsdp")
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 2)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS * SHARDS)
    names = sys.argv[1:]
    if names:
        print(*(f"| {' | '.join(row(name))} |" for name in names), sep="\n")
    else:
        PAGE.write_text(filled(PAGE.read_text()))
