"""Makes the table of docs/tables/stacked.txt from compiled programs.

python -m pages.stacked             writes the table
python -m pages.stacked bmuf easgd  prints the rows of these
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import syncalgos
from experiments.aim import hlo
from pages import table, traffic

PAGE = Path(__file__).parents[1] / "tables" / "stacked.txt"
HEAD = "algorithm", "vmap", "within", "shard_map", "within", "map by"
WORKERS, SHARDS = 4, 2
SHAPES = {"up": (256, 1024), "down": (1024, 256), "bias": (1024,)}
CUTS = {"up": (None, "fsdp"), "down": ("fsdp", None), "bias": ("fsdp",)}


def filled(page: str) -> str:
    """Returns the text of the page with the table between its marks."""
    lines = [HEAD, ("---",) * len(HEAD), *map(row, syncalgos.ALGORITHMS)]
    made = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table.MARKED.sub(lambda _: made, page)


def row(name: str) -> Sequence[str]:
    """Returns the cells of an algorithm."""
    make = syncalgos.ALGORITHMS[name]
    rate = {"learning_rate": 0.1} if traffic.needs_rate(make) else {}
    strategy = make(axis="diloco", **rate)
    by_vmap, by_shard_map = sent(strategy, None), sent(strategy, mesh())
    ratio = by_vmap[0] / by_shard_map[0]
    best = "shard_map" if ratio > 1.1 else "vmap" if ratio < 1 / 1.1 else "either"
    numbers = [f"{x / 1024:,.0f}" for x in (*by_vmap, *by_shard_map)]
    return f"`{name}`", *numbers, best


def sent(
    strategy: syncalgos.Strategy, over: jax.sharding.Mesh | None
) -> tuple[float, float]:
    """Returns the bytes of a device to other workers, and within its worker."""
    mapped = syncalgos.stacked(strategy, over)
    params = {
        name: jax.device_put(
            jnp.zeros((WORKERS, *shape)),
            NamedSharding(mesh(), PartitionSpec("diloco", *CUTS[name])),
        )
        for name, shape in SHAPES.items()
    }

    def synced(grads, replica, state, step):
        replica = replica._replace(loss=jnp.zeros(WORKERS))
        grads, state = mapped.reduce(grads, replica, state, step)
        moved = jax.tree.map(jnp.subtract, replica.params, grads)
        return mapped.sync(replica._replace(params=moved), state, step)

    count = jnp.zeros(WORKERS, jnp.int32)
    adam = optax.ScaleByAdamState(count, params, params)
    replica = syncalgos.Replica(params, adam)
    given = params, replica, mapped.init(params), jnp.int32(0)
    with jax.set_mesh(mesh()):
        text = jax.jit(synced).lower(*given).compile().as_text()
    found = hlo.read(text or "")

    def crosses(one: hlo.Collective) -> bool:
        return any(len({place // SHARDS for place in own}) > 1 for own in one.groups)

    return most(filter(crosses, found)), most(x for x in found if not crosses(x))


def most(found: Iterable[hlo.Collective], depth: int = 0) -> float:
    """Returns the bytes of the collectives, of each conditional's larger branch."""
    total, branches = 0.0, defaultdict(lambda: defaultdict(list))
    for one in found:
        if len(one.choices) == depth:
            total += float(one.bytes * one.times)
        else:
            conditional, branch = one.choices[depth]
            branches[conditional][branch].append(one)
    return total + sum(
        max(most(each, depth + 1) for each in taken.values())
        for taken in branches.values()
    )


def mesh() -> jax.sharding.Mesh:
    """Returns the mesh of the programs."""
    sizes, names = (WORKERS, SHARDS), ("diloco", "fsdp")
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 2)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS * SHARDS)
    if names := sys.argv[1:]:
        print(*(f"| {' | '.join(row(name))} |" for name in names), sep="\n")
    else:
        PAGE.write_text(filled(PAGE.read_text()))
