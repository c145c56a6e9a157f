"""The memory of loops by hand: `python -m benchmarks.engine.memory_by_hand`.

What they add to a process, a fresh one each, by worker: their state, their compiled
programs, and the peak of a third dispatch (Linux alone). Beside `benchmarks.memory`,
whose engine takes the same form (`by_hand.py`).
"""

import argparse
import gc
import itertools
import os
from typing import Any

import jax
import numpy as np

from benchmarks import memory
from benchmarks.engine import by_hand
from benchmarks.measure import in_fresh_processes, table_of
from benchmarks.work import WORK

COLUMNS = {
    "model": "model",
    "algorithm": "algorithm",
    "workers": "workers",
    "params, MB": lambda one: one["params_bytes"] / 1e6,
    "peak resident, MB a worker": lambda one: one["resident_bytes_per_worker"] / 1e6,
}


def measure(workers: int, name: str, model: str) -> dict[str, Any]:
    """A record; to be called first in a process."""
    devices = os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", devices)
    work = WORK[model]()
    params = sum(x.nbytes for x in jax.tree.leaves(work.params))
    rows = np.zeros((by_hand.PERIOD, workers * work.batch), np.int32)
    data = jax.device_put(work.data)
    gc.collect()
    before = memory.status("VmRSS")
    if name == "sync_sgd":
        go = by_hand.whole_batch(work)
    else:
        go = by_hand.loop(work, name, "map", workers, devices)
    go(0, data, rows)
    go(by_hand.PERIOD, data, rows)  # compiled again, for its own state
    gc.collect()
    memory.CLEAR.write_text("5")
    go(2 * by_hand.PERIOD, data, rows)
    return {
        "benchmark": "memory_by_hand",
        "model": model,
        "algorithm": name,
        "workers": workers,
        "params_bytes": params,
        "resident_bytes_per_worker": (memory.status("VmHWM") - before) // workers,
    }


def main() -> None:
    """Prints a record for each case, then a table."""
    parser = argparse.ArgumentParser(description="Peak memory of loops by hand.")
    parser.add_argument("--models", nargs="+", choices=WORK, default=["mlp"])
    parser.add_argument("--workers", type=int, nargs="+", default=[8])
    algorithms = ["sync_sgd", *by_hand.SYNCS]
    parser.add_argument(
        "--algorithms", nargs="+", choices=algorithms, default=algorithms
    )
    flags = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # as benchmarks.memory
    cases = itertools.product(flags.workers, flags.algorithms, flags.models)
    print(table_of(COLUMNS, in_fresh_processes(measure, cases, 1)))


if __name__ == "__main__":
    main()
