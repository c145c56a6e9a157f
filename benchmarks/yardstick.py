"""Compares the engine with hand-written loops: `python -m benchmarks.yardstick`.

For model averaging and BMUF with period 16, hand-written loops have two forms, on one
device and on all: vmap over a device's workers around one scan over the steps; and
rounds without a branch, in which lax.map takes one worker after the other. `same` is
the ratio to the form that the engine uses (`map` on all devices), `best` the ratio to
the fastest of all, by median. For sync_sgd the loop is one plain jitted gradient of the
whole global batch.

`plain_functions` is model averaging as a user would write it: a strategy of four plain
functions that declares when it acts. It is compared with the library's own strategy.

`of the matmuls alone` is the ratio to a program that does only the matmuls of a
worker's gradient, on random operands, with all devices busy (`engine/matmuls.py`).

All train with plain SGD, with data resident on the devices. They run in turn, ratios
are taken within a turn, and losses are compared in the first turn.
"""

import argparse
import itertools
import os
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

import syncalgos
from benchmarks import measure
from benchmarks.engine import by_hand, matmuls
from benchmarks.work import WORK, PyTree, Work, make_trainer
from syncalgos import Replica

Loop = Callable[[int, Any, np.ndarray], np.ndarray]


def plain_functions() -> syncalgos.Strategy:
    """Returns model averaging made of plain functions, without combinators."""

    def reduce(
        grads: PyTree, replica: Replica, state: PyTree, step: jax.Array
    ) -> tuple[PyTree, PyTree]:
        return grads, state

    def acts(step: jax.Array) -> jax.Array:
        return (step + 1) % by_hand.PERIOD == 0

    def sync(
        replica: Replica, state: PyTree, step: jax.Array
    ) -> tuple[Replica, PyTree]:
        def average() -> Replica:
            return replica._replace(params=syncalgos.collectives.mean(replica.params))

        return lax.cond(acts(step), average, lambda: replica), state

    def center(params: PyTree, state: PyTree) -> PyTree:
        return syncalgos.collectives.mean(params)

    return syncalgos.Strategy(lambda params: (), reduce, sync, center, acts)


ALGORITHMS: dict[str, Callable[[], syncalgos.Strategy]] = {
    "model_averaging": lambda: syncalgos.model_averaging(by_hand.PERIOD),
    "bmuf": lambda: syncalgos.bmuf(by_hand.PERIOD),
    "sync_sgd": syncalgos.sync_sgd,
    "plain_functions": plain_functions,
}
ENGINE = "engine"
WHOLE_BATCH = "whole batch"
LIBRARY = "model_averaging"
MATMULS = "matmuls alone"
COLUMNS = {
    "model": "model",
    "algorithm": "algorithm",
    "workers": "workers",
    "form": "form",
    "to the same form": "ratio_to_same",
    "to the best": "ratio_to_best",
    "which is": "best",
    "worker-steps/s": lambda record: record["worker_steps_per_second"][ENGINE],
    "of the matmuls alone": "share_of_matmuls",
}
WARMUPS = 2  # a loop by hand compiles twice: for NumPy state, then for its own


class EngineLoop(NamedTuple):
    """The engine as a contestant: go(step, data, rows) -> losses, and its trainer."""

    go: Loop
    trainer: syncalgos.DataParallel


def by_engine(work: Work, algorithm: str, workers: int) -> EngineLoop:
    """Returns the engine's loop for an algorithm."""
    trainer = make_trainer(work.loss, ALGORITHMS[algorithm](), workers=workers)
    state = trainer.init(work.params)

    def go(step: int, data: Any, rows: np.ndarray) -> np.ndarray:
        nonlocal state
        state, metrics = trainer.run(state, rows, data)
        jax.block_until_ready(state)
        return np.asarray(metrics["loss"])

    return EngineLoop(go, trainer)


def loops(
    work: Work, algorithm: str, workers: int, same_form_only: bool = False
) -> dict[str, Loop]:
    """Returns the engine's contestants by name: hand-written loops, with one exception.

    The exception is `plain_functions`, whose contestant is the library's strategy.

    Args:
        work: the training work.
        algorithm: name of the algorithm, one of ALGORITHMS.
        workers: number of workers.
        same_form_only: whether to return only the form that the engine uses.
    """
    if algorithm == "sync_sgd":
        return {WHOLE_BATCH: by_hand.whole_batch(work)}
    if algorithm == "plain_functions":
        return {LIBRARY: by_engine(work, "model_averaging", workers).go}
    counts = [n for n in sorted({1, len(jax.devices())}) if workers % n == 0]
    cases = [*itertools.product(counts, by_hand.FORMS)]
    if same_form_only:
        cases = cases[-1:]
    return {
        f"{form} on {count}": by_hand.loop(work, algorithm, form, workers, count)
        for count, form in cases
    }


def contest(
    model: str,
    algorithm: str,
    workers: int,
    repeats: int,
    same_form_only: bool = False,
) -> dict[str, Any]:
    """Times all contestants in turn; returns a record."""
    work = WORK[model]()
    engine, trainer = by_engine(work, algorithm, workers)
    runs = {ENGINE: engine, **loops(work, algorithm, workers, same_form_only)}
    data = trainer.place(work.data)
    steps = max(by_hand.PERIOD, work.steps * 8 // workers)
    alone = matmuls.alone(work, steps * workers, trainer.layout.shape[0])
    rng = np.random.default_rng(0)
    rows = [
        rng.integers(0, work.examples, (steps, workers * work.batch), np.int32)
        for _ in range(WARMUPS + repeats)
    ]
    turns = dict.fromkeys(runs, 0)
    losses: dict[str, np.ndarray] = {}  # of the first turn: later, rounding has grown

    def run_turn(name: str) -> None:
        turn = turns[name]
        losses.setdefault(name, runs[name](turn * steps, data, rows[turn]))
        turns[name] = turn + 1

    timed_runs = {name: partial(run_turn, name) for name in runs}
    seconds = measure.in_turn({**timed_runs, MATMULS: alone}, repeats, WARMUPS)
    for name, run_losses in losses.items():
        np.testing.assert_allclose(run_losses, losses[ENGINE], 1e-3, err_msg=name)
    return {
        "benchmark": "yardstick",
        "model": model,
        "algorithm": algorithm,
        "workers": workers,
        "devices": trainer.layout.shape[0],
        "form": trainer.lane_form,
        "repeats": repeats,
        "matmul_megaflops": matmuls.flops(matmuls.products(work)) / 1e6,
        **compared(seconds, f"map on {trainer.layout.shape[0]}", steps * workers),
    }


def compared(
    seconds: dict[str, list[float]], engine_form: str, worker_steps: int
) -> dict[str, Any]:
    """Returns rates of all, and ratios of the engine to the same and the best form.

    Args:
        seconds: seconds of each turn, by name; those of the matmuls, too.
        engine_form: the hand-written form that the engine uses, if it was run.
        worker_steps: number of worker-steps in a turn.
    """
    forms = seconds.keys() - {ENGINE, MATMULS}
    best_form = min(forms, key=lambda name: median(seconds[name]))
    same_form = engine_form if engine_form in seconds else best_form
    return {
        "best": best_form,
        "worker_steps_per_second": {
            name: measure.rates(times, worker_steps) for name, times in seconds.items()
        },
        "ratio_to_same": measure.ratios(seconds[ENGINE], seconds[same_form]),
        "ratio_to_best": measure.ratios(seconds[ENGINE], seconds[best_form]),
        "share_of_matmuls": measure.ratios(seconds[ENGINE], seconds[MATMULS]),
    }


def main() -> None:
    """Prints a JSON line for each contest, and a table."""
    parser = argparse.ArgumentParser(description="The engine and hand-written loops.")
    parser.add_argument("--models", nargs="+", choices=WORK, default=["mlp"])
    algorithms = [*ALGORITHMS]
    parser.add_argument("--algos", nargs="+", choices=algorithms, default=algorithms)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--same", action="store_true", help="run only the loop of the engine's form"
    )
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    cases = itertools.product(arguments.models, arguments.algos, arguments.workers)
    records = [
        measure.print_record(contest(*case, arguments.repeats, arguments.same))
        for case in cases
    ]
    print(measure.table_of_records(COLUMNS, records))


if __name__ == "__main__":
    main()
