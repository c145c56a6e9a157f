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
from functools import partial
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
ENGINE = "engine"
UNSHARDED = "engine, unsharded"
COLUMNS = {
    "workers × devices": lambda record: f"{record['workers']} × {record['devices']}",
    "to the same form": "ratio_to_same",
    "to the best": "ratio_to_best",
    "which is": "best",
    "worker-steps/s": lambda record: record["worker_steps_per_second"][ENGINE],
    "unsharded": lambda record: record["worker_steps_per_second"][UNSHARDED],
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
    state = trainer.init(work.params)
    data = trainer.place(work.data)

    def go(rows: np.ndarray) -> np.ndarray:
        nonlocal state
        state, metrics = trainer.run(state, rows, data)
        jax.block_until_ready(state)
        return np.asarray(metrics["loss"])

    return go


def contest(workers: int, repeats: int, steps: int) -> dict[str, Any]:
    """Times all contestants in turn; returns a record."""
    work = WORK["gpt"]()
    devices = DEVICES // workers
    runs = {
        ENGINE: by_engine(work, workers, devices),
        UNSHARDED: by_engine(work, workers, None),
    }
    for form in mesh_by_hand.FORMS:
        runs[form] = mesh_by_hand.loop(work, form, workers, devices)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, work.examples, (steps, workers * work.batch), np.int32)
    losses: dict[str, np.ndarray] = {}

    def run(name: str) -> None:
        losses.setdefault(name, runs[name](rows))

    seconds = measure.in_turn({name: partial(run, name) for name in runs}, repeats)
    for name, run_losses in losses.items():
        np.testing.assert_allclose(run_losses, losses[ENGINE], 1e-3, err_msg=name)
    engine_form, *_ = forms = [*mesh_by_hand.FORMS]
    best_form = min(forms, key=lambda name: median(seconds[name]))
    rates = {
        name: measure.rates(times, steps * workers) for name, times in seconds.items()
    }
    return {
        "benchmark": "mesh",
        "model": "gpt",
        "algorithm": "model_averaging",
        "workers": workers,
        "devices": devices,
        "steps": steps,
        "repeats": repeats,
        "best": best_form,
        "worker_steps_per_second": rates,
        "ratio_to_same": measure.ratios(seconds[ENGINE], seconds[engine_form]),
        "ratio_to_best": measure.ratios(seconds[ENGINE], seconds[best_form]),
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
    records = [
        measure.print_record(contest(workers, flags.repeats, flags.steps))
        for workers in flags.workers
    ]
    print(measure.table_of_records(COLUMNS, records))


if __name__ == "__main__":
    main()
