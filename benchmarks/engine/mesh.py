"""Compares workers of several devices with loops: `python -m benchmarks.engine.mesh`.

A GPT (4 layers of width 128, 128 characters, 4 examples per worker) trains with model
averaging every 16 steps and plain SGD. Workers share 8 virtual CPU devices; each shards
its matrices and its batch over an axis "fsdp". The hand-written loops use only jax: one
maps the workers with shard_map, the other with vmap, and both leave "fsdp" to the
compiler. All run in turn, ratios are taken within a turn, and losses are compared in
the first turn. `unsharded` is the engine with one device for each worker.
"""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import numpy as np
import optax

import syncalgos
from benchmarks import measure
from benchmarks.engine import mesh_by_hand
from benchmarks.engine.mesh_by_hand import FSDP, PERIOD
from benchmarks.work import LR, WORK, Work

DEVICES = 8
ENGINE, UNSHARDED = "engine", "engine, unsharded"
COLUMNS = {
    "workers × devices": lambda one: f"{one['workers']} × {one['devices']}",
    "to the same form": "ratio_to_same",
    "to the best": "ratio_to_best",
    "which is": "best",
    "worker-steps/s": lambda one: one["worker_steps_per_second"][ENGINE],
    "unsharded": lambda one: one["worker_steps_per_second"][UNSHARDED],
}


def by_engine(
    work: Work, workers: int, devices: int | None
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns go(rows) -> losses; devices=None means one device a worker, no mesh."""
    trainer = syncalgos.DataParallel(
        work.loss,
        optax.sgd(LR),
        syncalgos.model_averaging(PERIOD),
        workers=workers,
        backend="shard_map",
        placement=syncalgos.Placement(
            mesh=None if devices is None else {FSDP: devices},
            shardings=None if devices is None else mesh_by_hand.shardings,
        ),
    )
    state, data = trainer.init(work.params), trainer.place(work.data)

    def go(rows):
        nonlocal state
        state, metrics = trainer.run(state, rows, data)
        jax.block_until_ready(state)
        return np.asarray(metrics["loss"])

    return go


def contest(workers: int, repeats: int, steps: int) -> dict[str, Any]:
    """Times all contestants in turn; returns a record."""
    work, devices = WORK["gpt"](), DEVICES // workers
    runs = {
        ENGINE: by_engine(work, workers, devices),
        UNSHARDED: by_engine(work, workers, None),
    }
    for form in mesh_by_hand.FORMS:
        runs[form] = mesh_by_hand.loop(work, form, workers, devices)
    rng, losses = np.random.default_rng(0), {}
    rows = rng.integers(0, work.examples, (steps, workers * work.batch), np.int32)

    def timed(name):
        def run():
            losses.setdefault(name, runs[name](rows))

        return run

    seconds = measure.in_turn({name: timed(name) for name in runs}, repeats)
    for name, found in losses.items():
        np.testing.assert_allclose(found, losses[ENGINE], 1e-3, err_msg=name)
    same, *_ = by_hand = [*mesh_by_hand.FORMS]
    best = min(by_hand, key=lambda name: median(seconds[name]))
    rates = {name: measure.rates(x, steps * workers) for name, x in seconds.items()}
    return {
        "benchmark": "mesh",
        "model": "gpt",
        "algorithm": "model_averaging",
        "workers": workers,
        "devices": devices,
        "steps": steps,
        "repeats": repeats,
        "best": best,
        "worker_steps_per_second": rates,
        "ratio_to_same": measure.ratios(seconds[ENGINE], seconds[same]),
        "ratio_to_best": measure.ratios(seconds[ENGINE], seconds[best]),
    }


def main() -> None:
    """Prints a JSON line for each number of workers, and a table."""
    parser = argparse.ArgumentParser(description="Meshes and hand-written loops.")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=PERIOD, help="local steps per dispatch"
    )
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    found = [
        measure.report(contest(n, flags.repeats, flags.steps)) for n in flags.workers
    ]
    print(measure.table_of(COLUMNS, found))


if __name__ == "__main__":
    main()
