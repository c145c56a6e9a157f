"""Memory of workers of several devices: `python -m benchmarks.engine.mesh_memory`.

Two workers train a GPT with Adam and diloco, which syncs at each step, on virtual CPU
devices. For each size of the model and of the mesh it measures in a fresh process:

- a device's bytes of params, of Adam's state and of diloco's, from the arrays' shards;
- the peak of the program of two steps by XLA's own analysis of a device: arguments,
  results that do not replace arguments, and intermediate results (temporary);
- the same for plain local steps: the difference is the memory that the sync adds;
- the seconds of a step, and the peak resident set of the whole process.

Each worker takes 4 sequences of 32 tokens per step.
"""

import argparse
import itertools
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import syncalgos
from benchmarks.engine.mesh_by_hand import FSDP, PyTree, shardings
from benchmarks.measure import in_fresh_processes, table_of_records
from benchmarks.memory import analysis
from experiments.training.sends import device_bytes
from models import gpt

WORKERS = 2
BATCH = 4  # sequences of each worker
TIME = 32  # tokens
STEPS = 2  # local steps in a dispatch


class Size(NamedTuple):
    """The size of a GPT with heads of 64."""

    vocabulary: int
    width: int
    layers: int


SIZES = {
    "4M": Size(4096, 256, 4),
    "29M": Size(8192, 512, 8),
    "110M": Size(32768, 768, 12),
}


def _millions(*names: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda record: sum(record[name] for name in names) / 1e6


COLUMNS = {
    "params, million": _millions("params"),
    "devices of a worker": "devices",
    "params, MB a device": _millions("params_bytes"),
    "Adam": _millions("opt_state_bytes"),
    "diloco": _millions("sync_bytes"),
    "temporary": _millions("temp_bytes"),
    "peak": _millions("peak_bytes"),
    "peak of local steps": _millions("local_peak_bytes"),
    "s a step": "step_seconds",
    "resident, all devices": _millions("resident_bytes"),
}


def measure_mesh_memory(size: str, devices: int) -> dict[str, Any]:
    """Returns a record; must be the first call in a process."""
    jax.config.update("jax_num_cpu_devices", WORKERS * devices)
    params = gpt.init(jax.random.key(0), *_arguments(SIZES[size]))
    param_count = sum(x.size for x in jax.tree.leaves(params))
    local_figures = _measure_strategy(params, syncalgos.Strategy(), size, devices)
    diloco = syncalgos.diloco(period=1)
    diloco_figures = _measure_strategy(params, diloco, size, devices)
    return {
        "benchmark": "mesh_memory",
        "size": size,
        "params": param_count,
        "workers": WORKERS,
        "devices": devices,
        **diloco_figures,
        "local_peak_bytes": local_figures["peak_bytes"],
        "local_temp_bytes": local_figures["temp_bytes"],
        "resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _arguments(size: Size) -> tuple[int, int, int, int]:
    return size.vocabulary, TIME, size.width, size.layers


def _measure_strategy(
    params: PyTree, strategy: syncalgos.Strategy, size: str, devices: int
) -> dict[str, Any]:
    """Returns a device's bytes and the seconds of a step, for a strategy."""
    vocabulary, width, _ = SIZES[size]

    def loss(params: PyTree, text: jax.Array) -> jax.Array:
        logits = gpt.apply(params, text[:, :-1], width // 64)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
        return losses.mean()

    trainer = syncalgos.DataParallel(
        loss,
        optax.adam(1e-4),
        strategy,
        workers=WORKERS,
        backend="shard_map",
        placement=syncalgos.Placement(mesh={FSDP: devices}, shardings=shardings),
    )
    state = trainer.init(params)
    state_bytes = {f"{part}_bytes": size for part, size in device_bytes(state).items()}
    shape = (STEPS, WORKERS * BATCH, TIME + 1)
    text = np.random.default_rng(0).integers(vocabulary, size=shape, dtype=np.int32)
    state, _ = jax.block_until_ready(trainer.run(state, text))
    start = time.perf_counter()
    state, metrics = jax.block_until_ready(trainer.run(state, text))
    seconds = (time.perf_counter() - start) / STEPS
    program = analysis(trainer)
    results = program.output_size_in_bytes - program.alias_size_in_bytes
    peak = program.argument_size_in_bytes + results + program.temp_size_in_bytes
    return {
        **state_bytes,
        "temp_bytes": program.temp_size_in_bytes,
        "peak_bytes": peak,
        "step_seconds": float(f"{seconds:.4g}"),
        "loss": [float(x) for x in np.asarray(metrics["loss"])],
    }


def main() -> None:
    """Prints a record for each size and mesh, then a table."""
    parser = argparse.ArgumentParser(description="A device's memory under meshes.")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["4M", "29M"])
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[1, 2, 4], help="devices per worker"
    )
    flags = parser.parse_args()
    cases = itertools.product(flags.sizes, flags.devices)
    print(
        table_of_records(
            COLUMNS, in_fresh_processes(measure_mesh_memory, cases, jobs=1)
        )
    )


if __name__ == "__main__":
    main()
