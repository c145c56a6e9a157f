"""Compares syncalgos with its peers: `python -m benchmarks.peers --environment DIR`.

EXO Gym, PyTorch (gloo) and torchft do the same work as syncalgos on this machine's
CPUs (`benchmarks.peers.work`), each with its own script in this folder. Each
measurement runs in a new process, and counts only training, without start-up,
compilation, warm-up and evaluation. A rate is in worker-steps/s: steps x workers /
seconds. Contestants run in turn, every other turn backwards; ratios are taken within a
turn. A measurement that lasts less than a second is repeated with more steps.

Peers are installed in a separate environment, which is made in DIR if it does not
exist. Each of their processes has cores / workers threads, at least one
(OMP_NUM_THREADS), and torchft's log of each step is off. A peer that cannot be
installed is named and skipped.
"""

import argparse
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import format_rows, print_record, rates, ratios
from benchmarks.peers.setup import prepare

ROOT = Path(__file__).parents[2]


class Script(NamedTuple):
    """A peer's script in this folder, and a number that divides the measured steps."""

    module: str
    chunk_steps: int


SCRIPTS = {
    "syncalgos": Script("own", 64),  # a dispatch
    "exogym": Script("exogym", 16),  # a period, so that the syncs are whole
    "torch": Script("torch_gloo", 16),
    "torchft": Script("torchft_diloco", 16),
}
MIN_SECONDS = 1.0  # of a measurement
INTENDED_SECONDS = 2.0


class Contestant(NamedTuple):
    """One algorithm of one library."""

    peer: str
    algorithm: str
    like: str  # the equivalent algorithm of syncalgos
    rate: float  # expected worker-steps/s, which sets only the steps of the first try


CONTESTANTS = (
    Contestant("syncalgos", "sync_sgd", "", 4000),
    Contestant("syncalgos", "model_averaging", "", 4000),
    Contestant("syncalgos", "bmuf", "", 4000),
    Contestant("syncalgos", "diloco", "", 4000),
    Contestant("exogym", "all_reduce", "sync_sgd", 60),
    Contestant("exogym", "fedavg", "model_averaging", 400),
    Contestant("exogym", "diloco", "diloco", 400),
    Contestant("torch", "ddp", "sync_sgd", 400),
    Contestant("torch", "averager", "model_averaging", 1600),
    Contestant("torchft", "ddp", "sync_sgd", 100),
    Contestant("torchft", "local_sgd", "model_averaging", 600),
    Contestant("torchft", "diloco", "diloco", 600),
)


class Entry(NamedTuple):
    """A contestant with a number of workers; lists grow by an item per turn."""

    contestant: Contestant
    workers: int
    seconds: list[float]  # per worker-step
    steps: list[int]  # the last item is for the next measurement


def steps_for(peer: str, rate: float, workers: int) -> int:
    """Returns a number of steps that take about INTENDED_SECONDS seconds."""
    chunk = SCRIPTS[peer].chunk_steps
    return chunk * max(1, ceil(INTENDED_SECONDS * rate / workers / chunk))


def run_contestant(command: list[str], threads: int, timeout: float) -> float:
    """Returns the seconds that a contestant's process reports.

    Args:
        command: the command that starts it.
        threads: number of threads of each process.
        timeout: most seconds that it may take.

    Raises:
        RuntimeError: it failed or took too long; the message has the reason, one line.
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "RUST_LOG": "error",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
    }
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its workers can be stopped with it
    )
    try:
        out, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result after {timeout:g} s") from None
    finally:
        if process.poll() is None:  # out of time, or Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    # Other processes may write into the same line.
    seconds = re.search(r'{"seconds": ([^}]+)}', out)
    if process.returncode or not seconds:
        lines = [line for line in errors.splitlines() if line.strip()] or ["no result"]
        raise RuntimeError(f"exit code {process.returncode}: {lines[-1].strip()}")
    return float(seconds[1])


def measure_entry(entry: Entry, turn: int, launch: list[str], timeout: float) -> None:
    """Measures once, reports it, and adds it to the entry."""
    peer = entry.contestant.peer
    algorithm = entry.contestant.algorithm
    workers = entry.workers
    seconds = rate = 0.0
    steps = 0
    threads = max(1, (os.cpu_count() or 1) // workers)
    while seconds < MIN_SECONDS:
        steps = entry.steps[-1]
        module = f"benchmarks.peers.{SCRIPTS[peer].module}"
        task = [module, algorithm, str(workers), str(steps)]
        seconds = run_contestant([*launch, "-m", *task], threads, timeout)
        rate = steps * workers / seconds
        entry.steps.append(steps_for(peer, rate, workers))
    entry.seconds.append(1 / rate)
    print_record(
        {
            "benchmark": "peers",
            "turn": turn,
            "peer": peer,
            "algorithm": algorithm,
            "workers": workers,
            "steps": steps,
            "seconds": round(seconds, 4),
            "worker_steps_per_second": round(rate, 1),
        }
    )


def measure_all(
    entries: list[Entry],
    pythons: dict[str, str],
    arguments: argparse.Namespace,
) -> list[Entry]:
    """Measures all in turn; returns the entries that never failed.

    Ctrl-C ends it early: the measurements so far count.
    """
    failed = []
    with suppress(KeyboardInterrupt):
        for turn in range(arguments.repeats):
            for entry in entries[:: -1 if turn % 2 else 1]:
                if entry in failed or attempt(entry, turn, pythons, arguments):
                    continue
                failed.append(entry)
    return [entry for entry in entries if entry not in failed and entry.seconds]


def attempt(
    entry: Entry, turn: int, pythons: dict[str, str], arguments: argparse.Namespace
) -> bool:
    """Measures once, and reports a failure; returns whether it succeeded."""
    peer = entry.contestant.peer
    launch = [*shlex.split(arguments.launcher), pythons[peer]]
    try:
        measure_entry(entry, turn, launch, arguments.timeout)
    except RuntimeError as error:
        print_record(
            {
                "benchmark": "peers",
                "peer": peer,
                "algorithm": entry.contestant.algorithm,
                "workers": entry.workers,
                "failed": str(error),
            }
        )
        return False
    return True


def summary(entries: list[Entry]) -> list[list]:
    """Returns rows of the table; reports spreads and ratios as records, too."""
    ours = {
        (entry.contestant.algorithm, entry.workers): entry.seconds
        for entry in entries
        if entry.contestant.peer == "syncalgos"
    }
    torch_medians = [
        statistics.median(entry.seconds)
        for entry in entries
        if entry.contestant.peer == "torch"
    ]
    best_torch = min(torch_medians, default=None)
    rows = []
    for (peer, algorithm, like, _), workers, seconds, _ in entries:
        record = {
            "benchmark": "peers",
            "peer": peer,
            "algorithm": algorithm,
            "workers": workers,
            "worker_steps_per_second": rates(seconds, 1),
        }
        ratio = ""
        ratio_to_best = ""
        if (like, workers) in ours:
            pairs = list(zip(ours[like, workers], seconds, strict=False))  # Ctrl-C
            ratio = ratios(*zip(*pairs, strict=True))
            record |= {"like": like, "syncalgos_to_peer": ratio}
        if peer == "syncalgos" and best_torch is not None:
            ratio_to_best = rates(seconds, best_torch)
            record["to_best_torch"] = ratio_to_best
        print_record(record)
        rate = record["worker_steps_per_second"]
        rows.append([workers, peer, algorithm, rate, like, ratio, ratio_to_best])
    return rows


def main():
    parser = argparse.ArgumentParser(description="Compare syncalgos with its peers.")
    parser.add_argument(
        "--environment", type=Path, required=True, help="folder to install peers in"
    )
    parser.add_argument(
        "--exogym", help="checkout of EXO Gym to install (default: from GitHub)"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3, help="number of turns")
    parser.add_argument(
        "--timeout", type=float, default=180, help="maximum seconds per measurement"
    )
    parser.add_argument(
        "--launcher",
        default="",
        help="a command that starts each measurement, such as 'taskset -c 0-3'",
    )
    arguments = parser.parse_args()
    environment = arguments.environment.absolute()
    versions, reasons = prepare(environment, arguments.exogym)
    for peer, reason in reasons.items():
        print_record({"benchmark": "peers", "peer": peer, "skipped": reason})
    print_record({"benchmark": "peers", "cores": os.cpu_count(), "versions": versions})
    peer_python = str(environment / "bin" / "python")
    pythons = {**dict.fromkeys(versions, peer_python), "syncalgos": sys.executable}
    contestants = [x for x in CONTESTANTS if x.peer in pythons]
    entries = []
    for workers in arguments.workers:
        for contestant in contestants:
            steps = steps_for(contestant.peer, contestant.rate, workers)
            entries.append(Entry(contestant, workers, [], [steps]))
    measured_entries = measure_all(entries, pythons, arguments)
    head = [
        "workers",
        "peer",
        "algorithm",
        "worker-steps/s",
        "beside",
        "syncalgos : peer",
        "syncalgos : best of torch",
    ]
    print(format_rows(head, summary(measured_entries)))


if __name__ == "__main__":
    main()
