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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import syncalgos
from benchmarks.measure import in_turn, report, spread, table_of
from benchmarks.scaling import Training, make

DEVICES = syncalgos.WORKERS[0]
CALLS = 64  # number of bare collectives in a dispatch
COLUMNS = {
    "algorithm": "algorithm",
    "workers": "workers",
    "syncs a step": lambda one: one["syncs"] / one["steps"],
    "kB sent a sync": lambda one: sum(one["bytes_per_sync"].values()) / 1e3,
    "added, ms a sync": "added_milliseconds",
    "bare, ms": "bare_milliseconds",
    "added / bare": "ratio",
    "of the least": "ratio_of_least",
    "steps / local steps": "times_local",
}


# Functions from the arrays that a device's lanes send, (lanes, length), to those that
# the lanes receive.
def _reduced(x: jax.Array) -> jax.Array:
    # XLA's own sum over the lanes takes up to 50 times as long on a CPU.
    mean = jnp.full(len(x), 1 / len(x)) @ x
    return jnp.broadcast_to(lax.pmean(mean, DEVICES), x.shape)


def _gathered(x: jax.Array) -> jax.Array:
    # The barrier keeps the compiler from sending only the part that is used.
    others = lax.optimization_barrier(lax.all_gather(x, DEVICES))
    return others[(lax.axis_index(DEVICES) + 1) % len(others)]


def _exchanged(x: jax.Array) -> jax.Array:
    lanes, length = x.shape
    by_device = x.reshape(lanes, lax.axis_size(DEVICES), lanes, -1)
    arrived = lax.all_to_all(by_device, DEVICES, 1, 1, tiled=True)
    return arrived.swapaxes(0, 2).reshape(lanes, length)


def _permuted(x: jax.Array) -> jax.Array:
    n = lax.axis_size(DEVICES)
    return lax.ppermute(x, DEVICES, [((i + 1) % n, i) for i in range(n)])


# For each collective: the bytes that a worker of n sends per byte of its array, as in
# the ledger, and a function that sends it.
BARE: dict[str, tuple[Callable[[int], float], Callable[[jax.Array], jax.Array]]] = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, _reduced),
    "all_gather": (lambda n: n - 1, _gathered),
    "all_to_all": (lambda n: (n - 1) / n, _exchanged),
    "permute": (lambda n: 1, _permuted),
}


def bare(sent: Mapping[str, float], training: Training) -> Callable[[], None]:
    """Returns go(), which sends this many bytes CALLS times and waits for the end.

    Args:
        sent: bytes of a worker, by collective.
        training: the training whose workers send.
    """
    layout, n = training.trainer.layout, training.trainer.workers
    parts = {}
    for name, size in sent.items():
        length = math.ceil(size / BARE[name][0](n) / 4 / n) * n
        parts[name] = np.ones((*layout.shape, length), np.float32)

    def on_device(parts):
        def sync(parts, _):
            return {name: BARE[name][1](x) for name, x in parts.items()}, None

        return lax.scan(sync, parts, length=CALLS)[0]

    run = jax.pmap(
        on_device, axis_name=DEVICES, devices=layout.devices, donate_argnums=0
    )
    state = run(parts)

    def go():
        nonlocal state
        state = jax.block_until_ready(run(state))

    return go


def per_sync(training: Training, first: int, last: int) -> tuple[int, dict[str, float]]:
    """Returns the number of syncs in steps first … last - 1, and bytes of each."""
    sent = training.trainer.communication(training.state, last)

    def since_first(cumulative):
        return float(cumulative[-1] - cumulative[first - 1])

    syncs = int((np.diff(sent.calls_per_step[first - 1 :]) > 0).sum())
    kinds = sent.by_collective.items()
    return syncs, {name: since_first(one.per_step) / syncs for name, one in kinds}


def measure(
    name: str, workers: int, steps: int, repeats: int, period: int
) -> dict[str, Any]:
    """Times an algorithm, local steps and the bare collective in turn."""
    training, local = (Training(make(x, period), workers) for x in (name, "local"))
    # The first dispatch is not timed.
    syncs, sent = per_sync(training, steps, steps * (1 + repeats))
    syncs_a_dispatch = syncs / repeats
    seconds = in_turn(
        {
            "algorithm": training.dispatch(steps),
            "local": local.dispatch(steps),
            "bare": bare(sent, training),
        },
        repeats,
    )

    def added(whole, plain):
        return (whole - plain) / syncs_a_dispatch

    turns = list(
        zip(*(seconds[x] for x in ("algorithm", "local", "bare")), strict=True)
    )
    least = {kind: min(times) for kind, times in seconds.items()}
    return {
        "benchmark": "sync_cost",
        "algorithm": name,
        "workers": workers,
        "layout": training.trainer.layout.shape,
        "period": period,
        "steps": steps,
        "syncs": syncs_a_dispatch,
        "bytes_per_sync": {kind: round(size) for kind, size in sent.items()},
        "added_milliseconds": spread([1e3 * added(a, b) for a, b, _ in turns]),
        "bare_milliseconds": spread([1e3 * c / CALLS for c in seconds["bare"]]),
        "ratio": spread([added(a, b) / (c / CALLS) for a, b, c in turns]),
        "ratio_of_least": added(least["algorithm"], least["local"])
        / (least["bare"] / CALLS),
        "times_local": spread([a / b for a, b, _ in turns]),
        "repeats": repeats,
    }


def main() -> None:
    """Prints a record for each algorithm, then a table."""
    parser = argparse.ArgumentParser(description="Time that syncs add to local steps.")
    parser.add_argument("--workers", type=int, nargs="+", default=[8], help="2 or more")
    parser.add_argument("--repeats", type=int, default=7, help="number of turns")
    parser.add_argument("--steps", type=int, default=64, help="steps per dispatch")
    parser.add_argument("--period", type=int, default=4, help="local steps per round")
    own = [*syncalgos.ALGORITHMS]
    parser.add_argument("--algos", nargs="+", choices=own, default=own, metavar="NAME")
    flags = parser.parse_args()
    if min(flags.workers) < 2:
        parser.error("--workers must be at least 2: a single worker sends nothing")
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    found = [
        report(measure(name, workers, flags.steps, flags.repeats, flags.period))
        for workers in flags.workers
        for name in flags.algos
    ]
    print(table_of(COLUMNS, found))


if __name__ == "__main__":
    main()
