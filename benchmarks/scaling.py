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
from typing import Any

import jax
import numpy as np
import optax

import syncalgos
from benchmarks.measure import in_turn, ratios, report, spread, table_of
from benchmarks.work import LR, WORK, trainer_of
from experiments.command.factories import ALGORITHM, passed_arguments

ROUND = 16  # local steps
LONGEST = 4096  # local steps in a dispatch
ALL = ["local", *syncalgos.ALGORITHMS]
FEW, MANY, WANTED = 8, 256, 1.35

COLUMNS = {
    "algorithm": "algorithm",
    "workers": "workers",
    "steps a dispatch": "steps",
    "µs a worker-step": "microseconds_per_worker_step",
    "times those at few": "times",
    "state, MB a worker": lambda one: one["state_bytes_per_worker"] / 1e6,
    "temporary, MB a device": lambda one: (one["temp_bytes_per_device"] or 0) / 1e6,
    f"at most {WANTED}": lambda one: _kept(one),
}

# Arguments where the defaults would not sync regularly in short runs.
OWN: dict[str, dict[str, Any]] = {
    "post_local_sgd": {"dense_steps": 1},
    "qsr": {"growth": LR},  # no round longer than the period
}


def make(name: str, period: int = ROUND) -> syncalgos.Strategy:
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
    settings = passed_arguments(ALGORITHM, factory, offered) | OWN.get(name, {})
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
        self.trainer = trainer_of(self.work.loss, strategy, workers=workers)
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

        def go():
            self.state, metrics = self.trainer.run(self.state, rows, self.data)
            jax.block_until_ready((self.state, metrics))

        return go

    @property
    def state_bytes(self) -> int:
        """Bytes of a worker's replica and strategy state."""
        leaves = jax.tree.leaves((self.state.replica, self.state.sync))
        return sum(x.nbytes for x in leaves) // self.trainer.workers


def warmed(training: Training, seconds: float) -> tuple[int, Callable[[], None]]:
    """Returns the steps in whole rounds of about `seconds`, and their dispatch."""
    go = training.dispatch(ROUND)

    def timed():
        start = time.perf_counter() - training.trainer.compile_seconds
        go()
        return time.perf_counter() - start - training.trainer.compile_seconds

    if timed() > 2 * seconds:
        return ROUND, go
    rounds = max(1, round(seconds / timed()))  # the first call takes longer
    steps = ROUND * min(rounds, LONGEST // ROUND)
    go = training.dispatch(steps)
    go()
    return steps, go


def measure(
    name: str, workers: Sequence[int], repeats: int, seconds: float
) -> list[dict[str, Any]]:
    """Returns a record for each number of workers, timed in turn."""
    trainings = {n: Training(make(name), n) for n in workers}
    ready = {n: warmed(one, seconds) for n, one in trainings.items()}
    steps = {n: taken for n, (taken, _) in ready.items()}
    found = in_turn({str(n): go for n, (_, go) in ready.items()}, repeats, warmups=0)
    micros = {n: [1e6 * s / (steps[n] * n) for s in found[str(n)]] for n in trainings}
    base = FEW if FEW in micros else min(micros)
    return [
        {
            "benchmark": "scaling",
            "algorithm": name,
            "workers": n,
            "layout": training.trainer.layout.shape,
            "steps": steps[n],
            "dispatch_seconds": spread(found[str(n)]),
            "microseconds_per_worker_step": spread(micros[n]),
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
    some = ["model_averaging", "bmuf", "sync_sgd"]
    parser.add_argument("--algos", nargs="+", choices=ALL, default=some, metavar="NAME")
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    found = [
        report(record)
        for name in flags.algos
        for record in measure(name, flags.workers, flags.repeats, flags.seconds)
    ]
    print(table_of(COLUMNS, found))


def _kept(record: Mapping[str, Any]) -> str:
    """Returns whether the target is met; "" if there is none."""
    if record["compared_with"] != FEW or record["workers"] != MANY:
        return ""
    return "yes" if record["times"][1] <= WANTED else "NO"


if __name__ == "__main__":
    main()
