"""Peak memory compared with the necessary memory: `python -m benchmarks.memory`.

For every algorithm and number of workers, measured in a fresh process, --jobs at a
time:

- the bytes that a worker must hold: its replica and strategy state, its gradients once
  (as much as its params), and its batch;
- the peak of the program of `DataParallel.run` by XLA's own analysis, for a device,
  divided by its workers: arguments, results that do not replace donated arguments, and
  intermediate results, without the resident data, which all workers share;
- the memory per worker that a second dispatch adds to the process, compared with its
  memory before the state was made (the peak of the resident set, on Linux);
- whether donation is complete, so that the results that replace arguments have as many
  bytes as the whole state.

The work is that of `benchmarks.scaling`, or another of --models, with a round of 4
steps per dispatch. The rows of its batches are included.
"""

import argparse
import gc
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

import syncalgos
from benchmarks.measure import in_fresh_processes, table_of_records
from benchmarks.scaling import ALL, Training, make_strategy
from benchmarks.work import WORK

STEPS = 4  # a round, so that there is a sync in a dispatch
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def _times_held(field: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda record: (record[field] or 0) / record["held_bytes_per_worker"]


def _megabytes(field: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda record: (record[field] or 0) / 1e6


COLUMNS = {
    "model": "model",
    "algorithm": "algorithm",
    "workers": "workers",
    "state, MB a worker": _megabytes("state_bytes_per_worker"),
    "must hold, MB a worker": _megabytes("held_bytes_per_worker"),
    "peak by XLA": _megabytes("peak_bytes_per_worker"),
    "times held": _times_held("peak_bytes_per_worker"),
    "peak resident": _megabytes("resident_bytes_per_worker"),
    "resident, times held": _times_held("resident_bytes_per_worker"),
    "state donated": lambda record: "yes" if record["donated"] else "NO",
}


def measure_memory(workers: int, name: str, model: str) -> dict[str, Any]:
    """Returns a record; must be the first call in a process."""
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    training = Training(make_strategy(name, STEPS), workers, model)
    go = training.dispatch(STEPS)
    lanes = training.trainer.layout.lanes
    go()  # compiles, which takes memory of its own
    state_bytes = training.state_bytes
    params_bytes = _count_bytes(training.state.replica.params) // workers
    data_bytes = _count_bytes(training.data)
    batch_bytes = data_bytes // training.work.examples * training.work.batch
    necessary_bytes = state_bytes + params_bytes + batch_bytes
    program = analysis(training.trainer)
    resident_bytes = measure_resident(training, go)
    peak_bytes = (
        program.argument_size_in_bytes
        - data_bytes
        + program.output_size_in_bytes
        - program.alias_size_in_bytes
        + program.temp_size_in_bytes
    )
    return {
        "benchmark": "memory",
        "model": model,
        "algorithm": name,
        "form": training.trainer.lane_form,
        "workers": workers,
        "lanes": lanes,
        "state_bytes_per_worker": state_bytes,
        "held_bytes_per_worker": necessary_bytes,
        "peak_bytes_per_worker": peak_bytes // lanes,
        "temp_bytes_per_worker": program.temp_size_in_bytes // lanes,
        "alias_bytes_per_worker": program.alias_size_in_bytes // lanes,
        "donated": program.alias_size_in_bytes >= state_bytes * lanes,
        "resident_bytes_per_worker": resident_bytes and resident_bytes // workers,
    }


def _count_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def analysis(trainer: syncalgos.DataParallel) -> Any:
    """Returns XLA's own analysis of the only program of `run`."""
    assert trainer.run_program is not None
    return trainer.run_program.memory_analysis()


def measure_resident(training: Training, go: Callable[[], None]) -> int | None:
    """Returns the bytes that a run adds to the process's memory; None without Linux."""
    if not STATUS.exists():
        return None
    del training.state
    gc.collect()
    start_bytes = read_status("VmRSS")
    training.begin()
    CLEAR.write_text("5")  # the peak starts anew
    go()
    return read_status("VmHWM") - start_bytes


def read_status(name: str) -> int:
    """Returns the bytes in a line such as `VmHWM:   123 kB`."""
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def main() -> None:
    """Prints a record for each algorithm and number of workers, then a table."""
    parser = argparse.ArgumentParser(description="Peak memory of each algorithm.")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--models", nargs="+", choices=WORK, default=["mlp"])
    parser.add_argument("--jobs", type=int, default=2, help="processes to run at once")
    parser.add_argument("--algos", nargs="+", choices=ALL, default=ALL, metavar="NAME")
    flags = parser.parse_args()
    # Freed memory is returned to the system at once, so that peaks show used memory.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    cases = itertools.product(flags.workers, flags.algos, flags.models)
    print(
        table_of_records(COLUMNS, in_fresh_processes(measure_memory, cases, flags.jobs))
    )


if __name__ == "__main__":
    main()
