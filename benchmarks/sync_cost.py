"""The time that a sync adds to plain local steps: `python -m benchmarks.sync_cost`.

For every algorithm, the added time is that of a dispatch of --steps local steps, minus
that of as many steps of `Strategy()`, which never syncs, divided by the number of syncs
in it. It is compared with the bare collective: a program of pmap over the same devices
that only all-reduces, gathers, exchanges or permutes one array per worker, with as many
bytes as a sync sends on average, as counted by `syncalgos.communication`. It uses
nothing of the engine. The three run in turn, and ratios are taken within a turn.

The work is that of `benchmarks.scaling`. Rounds are short (--period), so that the
difference is larger than the noise; work that an algorithm does at every local step is
counted as work of its syncs. Groups (hierarchical) are compared with an all-reduce over
all workers. "of the least" compares the shortest times of all turns, which are the
least noisy.
"""

import argparse
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import syncalgos
from benchmarks.measure import in_turn, print_record, summarize_spread, table_of_records
from benchmarks.scaling import Training, make_strategy

DEVICES = syncalgos.WORKERS[0]
CALLS = 64  # number of bare collectives in a dispatch
COLUMNS = {
    "algorithm": "algorithm",
    "workers": "workers",
    "syncs a step": lambda record: record["syncs"] / record["steps"],
    "kB sent a sync": lambda record: sum(record["bytes_per_sync"].values()) / 1e3,
    "added, ms a sync": "added_milliseconds",
    "bare, ms": "bare_milliseconds",
    "added / bare": "ratio",
    "of the least": "ratio_of_least",
    "steps / local steps": "times_local",
}


# Functions from the arrays that a device's lanes send, (lanes, length), to those that
# the lanes receive.
def _all_reduce(x: jax.Array) -> jax.Array:
    # XLA's own sum over the lanes takes up to 50 times as long on a CPU.
    mean = jnp.full(len(x), 1 / len(x)) @ x
    return jnp.broadcast_to(lax.pmean(mean, DEVICES), x.shape)


def _all_gather(x: jax.Array) -> jax.Array:
    # The barrier keeps the compiler from sending only the part that is used.
    gathered = lax.optimization_barrier(lax.all_gather(x, DEVICES))
    return gathered[(lax.axis_index(DEVICES) + 1) % len(gathered)]


def _all_to_all(x: jax.Array) -> jax.Array:
    lanes, length = x.shape
    by_device = x.reshape(lanes, lax.axis_size(DEVICES), lanes, -1)
    arrived = lax.all_to_all(by_device, DEVICES, 1, 1, tiled=True)
    return arrived.swapaxes(0, 2).reshape(lanes, length)


def _permute(x: jax.Array) -> jax.Array:
    n = lax.axis_size(DEVICES)
    return lax.ppermute(x, DEVICES, [((i + 1) % n, i) for i in range(n)])


class BareSync(NamedTuple):
    """A bare collective.

    Attributes:
        relative_bytes: number of workers -> the bytes that each sends per byte of its
            array, as in the ledger.
        send: a function that sends the array.
    """

    relative_bytes: Callable[[int], float]
    send: Callable[[jax.Array], jax.Array]


BARE = {
    "all_reduce": BareSync(lambda n: 2 * (n - 1) / n, _all_reduce),
    "all_gather": BareSync(lambda n: n - 1, _all_gather),
    "all_to_all": BareSync(lambda n: (n - 1) / n, _all_to_all),
    "permute": BareSync(lambda n: 1, _permute),
}


def bare(sync_bytes: Mapping[str, float], training: Training) -> Callable[[], None]:
    """Returns go(), which sends this many bytes CALLS times and waits for the end.

    Args:
        sync_bytes: bytes of a worker, by collective.
        training: the training whose workers send.
    """
    layout = training.trainer.layout
    workers = training.trainer.workers
    arrays = {}
    for name, size in sync_bytes.items():
        array_bytes = size / BARE[name].relative_bytes(workers)
        length = math.ceil(array_bytes / 4 / workers) * workers
        arrays[name] = np.ones((*layout.shape, length), np.float32)

    def run_device(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def sync(
            arrays: dict[str, jax.Array], _: None
        ) -> tuple[dict[str, jax.Array], None]:
            return {name: BARE[name].send(x) for name, x in arrays.items()}, None

        return lax.scan(sync, arrays, length=CALLS)[0]

    run = jax.pmap(
        run_device, axis_name=DEVICES, devices=layout.devices, donate_argnums=0
    )
    state = run(arrays)

    def go() -> None:
        nonlocal state
        state = jax.block_until_ready(run(state))

    return go


class Syncs(NamedTuple):
    """The syncs of some local steps.

    Attributes:
        number: number of syncs.
        mean_bytes: bytes that a worker sends in each, by collective.
    """

    number: int
    mean_bytes: dict[str, float]


def count_syncs(training: Training, start: int, stop: int) -> Syncs:
    """Returns the syncs in steps start … stop - 1."""
    ledger = training.trainer.communication(training.state, stop)
    number = int((np.diff(ledger.calls_per_step[start - 1 :]) > 0).sum())
    mean_bytes = {}
    for name, collective in ledger.by_collective.items():
        cumulative = collective.per_step
        mean_bytes[name] = float(cumulative[-1] - cumulative[start - 1]) / number
    return Syncs(number, mean_bytes)


def measure_sync(
    name: str, workers: int, steps: int, repeats: int, period: int
) -> dict[str, Any]:
    """Times an algorithm, local steps and the bare collective in turn."""
    training = Training(make_strategy(name, period), workers)
    local_training = Training(make_strategy("local", period), workers)
    # The first dispatch is not timed.
    syncs = count_syncs(training, start=steps, stop=steps * (1 + repeats))
    syncs_a_dispatch = syncs.number / repeats
    seconds = in_turn(
        {
            "algorithm": training.dispatch(steps),
            "local": local_training.dispatch(steps),
            "bare": bare(syncs.mean_bytes, training),
        },
        repeats,
    )

    def added_seconds(algorithm_seconds: float, local_seconds: float) -> float:
        return (algorithm_seconds - local_seconds) / syncs_a_dispatch

    added = []
    times_local = []
    for algorithm, local in zip(seconds["algorithm"], seconds["local"], strict=True):
        added.append(added_seconds(algorithm, local))
        times_local.append(algorithm / local)
    bare_calls = [dispatch_seconds / CALLS for dispatch_seconds in seconds["bare"]]
    least = {kind: min(times) for kind, times in seconds.items()}
    least_added = added_seconds(least["algorithm"], least["local"])
    return {
        "benchmark": "sync_cost",
        "algorithm": name,
        "workers": workers,
        "layout": training.trainer.layout.shape,
        "period": period,
        "steps": steps,
        "syncs": syncs_a_dispatch,
        "bytes_per_sync": {
            kind: round(size) for kind, size in syncs.mean_bytes.items()
        },
        "added_milliseconds": summarize_spread([1e3 * x for x in added]),
        "bare_milliseconds": summarize_spread([1e3 * x for x in bare_calls]),
        "ratio": summarize_spread(
            [x / y for x, y in zip(added, bare_calls, strict=True)]
        ),
        "ratio_of_least": least_added / (least["bare"] / CALLS),
        "times_local": summarize_spread(times_local),
        "repeats": repeats,
    }


def main() -> None:
    """Prints a record for each algorithm, then a table."""
    parser = argparse.ArgumentParser(description="Time that syncs add to local steps.")
    parser.add_argument("--workers", type=int, nargs="+", default=[8], help="2 or more")
    parser.add_argument("--repeats", type=int, default=7, help="number of turns")
    parser.add_argument("--steps", type=int, default=64, help="steps per dispatch")
    parser.add_argument("--period", type=int, default=4, help="local steps per round")
    algorithms = [*syncalgos.ALGORITHMS]
    parser.add_argument(
        "--algos", nargs="+", choices=algorithms, default=algorithms, metavar="NAME"
    )
    flags = parser.parse_args()
    if min(flags.workers) < 2:
        parser.error("--workers must be at least 2: a single worker sends nothing")
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    records = []
    for workers in flags.workers:
        for name in flags.algos:
            record = measure_sync(
                name, workers, flags.steps, flags.repeats, flags.period
            )
            records.append(print_record(record))
    print(table_of_records(COLUMNS, records))


if __name__ == "__main__":
    main()
