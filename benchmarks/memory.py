"""Peak memory against what must be held: `python -m benchmarks.memory`.

For every algorithm and number of workers, in a fresh process each, --jobs at a time:

- what a worker must hold: its replica and strategy state, its gradients once (as much
  as its params), and its batch;
- the peak of the program of `DataParallel.run` by XLA's own analysis: arguments, and
  results that do not take their place (donated arguments do), and intermediate results,
  of a device, by its workers; without the resident data, which all workers share;
- by how much a second dispatch raises the memory of the process (the peak of its
  resident set, on Linux) over what it held before the model came, by worker;
- whether donation is complete: the results that take an argument's place are as many
  bytes as the whole state.

Work is that of `benchmarks.scaling`, a round of 4 steps a dispatch; its rows count too.
"""

import argparse
import gc
import itertools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax

import syncalgos
from benchmarks.measure import table, tell
from benchmarks.scaling import Training, make
from syncalgos.engine.worker import Worker

STEPS = 4  # a round, so that there is a sync in a dispatch
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
COLUMNS = (
    "algorithm",
    "workers",
    "state, MB a worker",
    "must hold, MB a worker",
    "peak by XLA",
    "of it",
    "peak resident",
    "of it",
    "state donated",
)


def measure(workers: int, name: str) -> dict[str, Any]:
    """A record; to be called first in a process."""
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    training = Training(make(name, STEPS), workers)
    go, lanes = training.dispatch(STEPS), training.trainer.layout.lanes
    go()  # compiles, which takes memory of its own
    state = training.state_bytes
    params = (
        sum(x.nbytes for x in jax.tree.leaves(training.state.replica.params)) // workers
    )
    data = sum(x.nbytes for x in jax.tree.leaves(training.data))
    batch = data // training.work.examples * training.work.batch
    held = state + params + batch
    program = analysis(training.trainer)
    resident = witnessed(training, go)
    peak = (
        program.argument_size_in_bytes
        - data
        + program.output_size_in_bytes
        - program.alias_size_in_bytes
        + program.temp_size_in_bytes
    )
    return {
        "benchmark": "memory",
        "algorithm": name,
        "workers": workers,
        "lanes": lanes,
        "state_bytes_per_worker": state,
        "held_bytes_per_worker": held,
        "peak_bytes_per_worker": peak // lanes,
        "temp_bytes_per_worker": program.temp_size_in_bytes // lanes,
        "alias_bytes_per_worker": program.alias_size_in_bytes // lanes,
        "donated": program.alias_size_in_bytes >= state * lanes,
        "resident_bytes_per_worker": resident and resident // workers,
    }


def analysis(trainer: syncalgos.DataParallel) -> Any:
    """XLA's own analysis of the only program of `run`.

    The engine tells temp_bytes alone, so this looks into it.
    """
    programs = trainer._compiled.items()
    return next(x.memory_analysis() for key, x in programs if key[0] is Worker.run)


def witnessed(training: Training, go: Callable[[], None]) -> int | None:
    """Bytes by which a run raises the process's memory; None where Linux is not."""
    if not STATUS.exists():
        return None
    del training.state
    gc.collect()
    before = _status("VmRSS")
    training.begin()
    CLEAR.write_text("5")  # the peak starts anew
    go()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Bytes, of a line such as `VmHWM:   123 kB`."""
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(name))


def main() -> None:
    """Prints a record for each algorithm and number of workers, then a table."""
    parser = argparse.ArgumentParser(description="Peak memory of each algorithm.")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "--algorithms",
        nargs="+",
        choices=["local", *syncalgos.ALGORITHMS],
        default=["local", *syncalgos.ALGORITHMS],
        metavar="NAME",
    )
    flags = parser.parse_args()
    # What is freed goes back to the system at once, so that peaks are of what is held.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    pool = ProcessPoolExecutor(
        flags.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    )
    rows = []
    with pool:
        cases = itertools.product(flags.workers, flags.algorithms)
        for record in pool.map(measure, *zip(*cases, strict=True)):
            tell(record)
            rows.append(_cells(record))
    print(table(COLUMNS, rows))


def _cells(record: dict[str, Any]) -> list[Any]:
    peaks = record["peak_bytes_per_worker"], record["resident_bytes_per_worker"]
    held = record["held_bytes_per_worker"]
    return [
        record["algorithm"],
        record["workers"],
        record["state_bytes_per_worker"] / 1e6,
        held / 1e6,
        *(x for peak in peaks for x in ((peak or 0) / 1e6, (peak or 0) / held)),
        "yes" if record["donated"] else "NO",
    ]


if __name__ == "__main__":
    main()
