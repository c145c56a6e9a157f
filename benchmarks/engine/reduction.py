"""One flat reduction against many small ones: `python -m benchmarks.engine.reduction`.

The mean over all workers of the params of a model, on two devices of some lanes each:

- `leaves`: leaf by leaf, as `syncalgos.collectives.mean` was first written;
- `tree`: one call of `lax.pmean` with the whole tree;
- `flat`: all leaves as one vector, which is cut again;
- `matmul`: leaf by leaf, the lanes of a device by a product with a vector, and the
  devices by `lax.pmean`.

Each is a dispatch of --steps means (fewer of many lanes), one after the other in a
scan, and they run in turn. `all-reduces` are those in the compiled program: XLA may
combine what it is given.

With `--processes 2` each device is a process of its own, and they talk by gloo over
localhost: copying is then what a message costs.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.measure import in_turn, ratios, report, reported_by, spread, table_of
from benchmarks.work import WORK
from experiments.launch.addresses import free_port
from experiments.launch.gloo import listen_towards

DEVICES, LANES = "devices", "lanes"
SPLIT = PartitionSpec(DEVICES)
PATIENCE = 60  # seconds, for the other process
BASE = "leaves"
MODELS = ("mlp", "lstm", "gpt")
COLUMNS = {
    "model": "model",
    "leaves": "leaves",
    "MB a worker": lambda one: one["bytes"] / 1e6,
    "lanes": "lanes",
    "processes": "processes",
    "form": "form",
    "all-reduces": "all_reduces",
    "ms a mean": "milliseconds",
    "times as fast as leaves": "times_as_fast",
}


def _leaves(tree):
    return jax.tree.map(lambda x: lax.pmean(x, (DEVICES, LANES)), tree)


def _tree(tree):
    return lax.pmean(tree, (DEVICES, LANES))


def _flat(tree):
    vector, unravel = ravel_pytree(tree)
    return unravel(lax.pmean(vector, (DEVICES, LANES)))


def _matmul(tree):
    """Takes the leaves of a device, which lead with the lanes."""

    def mean(x):
        lanes = len(x)
        own = jnp.full(lanes, 1 / lanes) @ x.reshape(lanes, -1)
        both = lax.pmean(own, DEVICES)
        return jnp.broadcast_to(both, (lanes, *both.shape)).reshape(x.shape)

    return jax.tree.map(mean, tree)


FORMS: dict[str, Callable[[Any], Any]] = {
    BASE: jax.vmap(_leaves, axis_name=LANES),
    "tree": jax.vmap(_tree, axis_name=LANES),
    "flat": jax.vmap(_flat, axis_name=LANES),
    "matmul": _matmul,
}


def compiled(
    form: Callable[[Any], Any], params: Any, lanes: int, steps: int
) -> tuple[Callable[[], None], int]:
    """Returns go(), a dispatch of so many means, and the all-reduces of one."""

    def on_device(params):
        return lax.scan(lambda p, _: (form(p), None), params, length=steps)[0]

    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), (DEVICES,)), SPLIT)

    def put(x):
        here = jax.local_device_count(), lanes, *x.shape
        own = np.broadcast_to(np.asarray(x), here)
        return jax.make_array_from_process_local_data(sharding, own)

    state = jax.tree.map(put, params)
    run = jax.pmap(on_device, axis_name=DEVICES, donate_argnums=0)
    program = run.lower(state).compile()
    count = program.as_text().count(" all-reduce(")

    def go():
        nonlocal state
        state = jax.block_until_ready(program(state))

    return go, count


def measure(model: str, lanes: int, steps: int, repeats: int) -> Iterator[dict]:
    """A record for each form, timed in turn; a mean of equal params is known."""
    params = WORK[model]().params
    leaves = jax.tree.leaves(params)
    programs = {
        name: compiled(form, params, lanes, steps) for name, form in FORMS.items()
    }
    seconds = in_turn({name: go for name, (go, _) in programs.items()}, repeats)
    for name, times in seconds.items():
        yield {
            "benchmark": "reduction",
            "model": model,
            "leaves": len(leaves),
            "bytes": sum(x.nbytes for x in leaves),
            "lanes": lanes,
            "devices": jax.device_count(),
            "processes": jax.process_count(),
            "form": name,
            "all_reduces": programs[name][1],
            "milliseconds": spread([1e3 * s / steps for s in times]),
            "times_as_fast": ratios(times, seconds[BASE]),
            "repeats": repeats,
        }


def measure_all(flags: argparse.Namespace) -> Iterator[dict]:
    """The records, of all devices there are."""
    for model in flags.models:
        for lanes in flags.lanes:
            steps = max(1, flags.steps // lanes)
            yield from measure(model, lanes, steps, flags.repeats)


def take_part(number: int, flags: argparse.Namespace) -> None:
    """Takes part as one of two processes; the first reports the records."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    bind_address = listen_towards(flags.coordinator)
    jax.distributed.initialize(
        flags.coordinator,
        2,
        number,
        initialization_timeout=PATIENCE,
        coordinator_bind_address=bind_address,
    )
    for record in measure_all(flags):
        if number == 0:
            report(record)
    jax.distributed.shutdown()


def from_two_processes(words: Sequence[str]) -> Iterator[dict]:
    """The records of two processes that are started with these flags."""
    where = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "benchmarks.engine.reduction", *words]
    joining = ["--coordinator", where, "--process"]
    return reported_by([[*command, *joining, str(number)] for number in (0, 1)])


def main() -> None:
    """Prints a record for each model, number of lanes and form, then a table."""
    parser = argparse.ArgumentParser(description="Many reductions or a flat one.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--lanes", type=int, nargs="+", default=[1, 4, 32], help="of each device"
    )
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--steps", type=int, default=32, help="means a dispatch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.process is not None:
        take_part(flags.process, flags)
        return
    if flags.processes == 2:
        found = from_two_processes(sys.argv[1:])
    else:
        jax.config.update("jax_num_cpu_devices", 2)
        found = measure_all(flags)
    print(table_of(COLUMNS, [*map(report, found)]))


if __name__ == "__main__":
    main()
