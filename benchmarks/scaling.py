"""Speed by the number of simulated workers: `python -m benchmarks.scaling`.

It measures the seconds per worker-step for each algorithm and number of workers: the
time of a dispatch divided by its local steps and by the workers. An MLP 784-256-256-10
trains on 32 examples per worker and step, with plain SGD at 0.01. The data is resident
on the devices; a dispatch gets only the row numbers of its batches.

The numbers of workers of an algorithm run in turn. A dispatch has as many whole rounds
of 16 steps as take about --seconds, at least one. Each record also has the bytes of a
worker's state, and of a device's intermediate results by XLA's own analysis. The
target is that a worker-step with 256 workers takes at most 1.35 times as long as with
8.
"""

import argparse
import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import syncalgos
from benchmarks.measure import (
    in_turn,
    print_record,
    ratios,
    summarize_spread,
    table_of_records,
)
from benchmarks.work import LR, WORK, make_trainer
from experiments.command.factories import ALGORITHM, select_offered

ROUND = 16  # local steps
LONGEST = 4096  # local steps in a dispatch
ALL = ["local", *syncalgos.ALGORITHMS]
BASE_WORKERS = 8
TARGET_WORKERS = 256
TARGET_RATIO = 1.35

COLUMNS = {
    "algorithm": "algorithm",
    "workers": "workers",
    "steps a dispatch": "steps",
    "µs a worker-step": "microseconds_per_worker_step",
    "times those at few": "times",
    "state, MB a worker": lambda record: record["state_bytes_per_worker"] / 1e6,
    "temporary, MB a device": lambda record: (
        (record["temp_bytes_per_device"] or 0) / 1e6
    ),
    f"at most {TARGET_RATIO}": lambda record: _meets_target(record),
}

# Arguments where the defaults would not sync regularly in short runs.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "post_local_sgd": {"dense_steps": 1},
    "qsr": {"growth": LR},  # no round longer than the period
}


def make_strategy(name: str, period: int = ROUND) -> syncalgos.Strategy:
    """Returns an algorithm of the registry; plain local steps for "local".

    Args:
        name: name of the algorithm.
        period: local steps between syncs, for algorithms that have rounds by default.
    """
    if name == "local":
        return syncalgos.Strategy()
    factory = syncalgos.ALGORITHMS[name]
    offered = {
        "learning_rate": LR,
        "optimizer": optax.sgd(LR),
        "seed": 0,
        "hosts": 1,
    }
    settings = select_offered(ALGORITHM, factory, offered) | ARGUMENTS.get(name, {})
    parameters = inspect.signature(factory).parameters
    if "period" in parameters and parameters["period"].default != 1:
        settings["period"] = period
    if "inner_period" in parameters:
        settings["inner_period"] = max(1, period // 4)
    return factory(**settings)


class Training:
    """The training that is timed.

    Attributes:
        work: the model, its loss and its data.
        trainer: the engine.
        state: the state after the dispatches so far.
        data: the data, resident on the devices.
    """

    def __init__(self, strategy: syncalgos.Strategy, workers: int, model: str = "mlp"):
        self.work = WORK[model]()
        self.trainer = make_trainer(self.work.loss, strategy, workers=workers)
        self.begin()
        self.data = self.trainer.place(self.work.data)
        self._rng = np.random.default_rng(0)

    def begin(self) -> None:
        """Starts again from the first state."""
        self.state = self.trainer.init(self.work.params)

    def dispatch(self, steps: int) -> Callable[[], None]:
        """Returns go(), which takes `steps` steps and waits for their end."""
        shape = (steps, self.trainer.workers * self.work.batch)
        rows = self._rng.integers(0, self.work.examples, shape, np.int32)

        def go() -> None:
            self.state, metrics = self.trainer.run(self.state, rows, self.data)
            jax.block_until_ready((self.state, metrics))

        return go

    @property
    def state_bytes(self) -> int:
        """Bytes of a worker's replica and strategy state."""
        leaves = jax.tree.leaves((self.state.replica, self.state.sync))
        return sum(x.nbytes for x in leaves) // self.trainer.workers


class Dispatch(NamedTuple):
    """A compiled dispatch: its local steps, and a function that takes them."""

    steps: int
    go: Callable[[], None]


def warm_up(training: Training, seconds: float) -> Dispatch:
    """Returns a dispatch of whole rounds that takes about `seconds`."""
    go = training.dispatch(ROUND)

    def time_round() -> float:
        start = time.perf_counter() - training.trainer.compile_seconds
        go()
        return time.perf_counter() - start - training.trainer.compile_seconds

    if time_round() > 2 * seconds:
        return Dispatch(ROUND, go)
    rounds = max(1, round(seconds / time_round()))  # the first call takes longer
    steps = ROUND * min(rounds, LONGEST // ROUND)
    longer_go = training.dispatch(steps)
    longer_go()
    return Dispatch(steps, longer_go)


def measure_scaling(
    name: str, workers: Sequence[int], repeats: int, seconds: float
) -> list[dict[str, Any]]:
    """Returns a record for each number of workers, timed in turn."""
    trainings = {n: Training(make_strategy(name), n) for n in workers}
    dispatches = {n: warm_up(training, seconds) for n, training in trainings.items()}
    runs = {str(n): dispatch.go for n, dispatch in dispatches.items()}
    dispatch_seconds = in_turn(runs, repeats, warmups=0)
    micros = {}
    for n, dispatch in dispatches.items():
        worker_steps = dispatch.steps * n
        micros[n] = [1e6 * s / worker_steps for s in dispatch_seconds[str(n)]]
    base = BASE_WORKERS if BASE_WORKERS in micros else min(micros)
    return [
        {
            "benchmark": "scaling",
            "algorithm": name,
            "workers": n,
            "layout": training.trainer.layout.shape,
            "steps": dispatches[n].steps,
            "dispatch_seconds": summarize_spread(dispatch_seconds[str(n)]),
            "microseconds_per_worker_step": summarize_spread(micros[n]),
            "compared_with": base,
            "times": ratios(micros[base], micros[n]),
            "state_bytes_per_worker": training.state_bytes,
            "temp_bytes_per_device": training.trainer.temp_bytes,
            "repeats": repeats,
        }
        for n, training in trainings.items()
    ]


def main() -> None:
    """Prints a record for each algorithm and number of workers, then a table."""
    parser = argparse.ArgumentParser(description="Speed by the number of workers.")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=3, help="number of turns")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds a dispatch")
    default = ["model_averaging", "bmuf", "sync_sgd"]
    parser.add_argument(
        "--algos", nargs="+", choices=ALL, default=default, metavar="NAME"
    )
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    records = []
    for name in flags.algos:
        algorithm_records = measure_scaling(
            name, flags.workers, flags.repeats, flags.seconds
        )
        records += map(print_record, algorithm_records)
    print(table_of_records(COLUMNS, records))


def _meets_target(record: Mapping[str, Any]) -> str:
    """Returns whether the target is met; "" if there is none."""
    is_compared = record["compared_with"] == BASE_WORKERS
    if not is_compared or record["workers"] != TARGET_WORKERS:
        return ""
    return "yes" if record["times"][1] <= TARGET_RATIO else "NO"


if __name__ == "__main__":
    main()
