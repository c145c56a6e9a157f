"""Compares scaling with workers to PyTorch's: `python -m benchmarks.peers.scale`.

The work is that of `benchmarks.peers`, 32 examples per worker and step, so the ideal
rate grows with the workers up to the number of cores. A worker of syncalgos is a
virtual device of one process ("devices"), or a process that is connected to the others
by gloo ("processes"); PyTorch's workers are processes with gloo. All have one thread
per worker. "alone" are processes that train without communication, which shows what the
machine itself allows.

Each measurement runs in new processes, and counts only training. Forms run in turn,
every other turn backwards, and ratios are taken within a turn. `times` is the rate
divided by that of one worker of the same library; `efficiency` divides it by the number
of workers, or of cores if there are fewer, because workers then take turns on them.

PyTorch is installed in the folder of --environment if it is missing; without that flag,
its forms are left out.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import rates, ratios, report, table_of
from benchmarks.peers.__main__ import LEAST, run, steps_for
from benchmarks.peers.setup import prepare

CORES = os.cpu_count() or 1


class Form(NamedTuple):
    """A form of workers.

    Attributes:
        library: the library that trains.
        words: the module that trains, and its arguments before the algorithm.
        algorithms: the module's names of algorithms, by name in syncalgos.
        least: smallest measured number of workers; with a single worker the form equals
            another one of its library.
    """

    library: str
    words: Sequence[str]
    algorithms: Mapping[str, str]
    least: int = 1


OWN = "benchmarks.peers.own_workers"
NAMES = ("sync_sgd", "model_averaging")
PLAIN = {name: name for name in NAMES}
FORMS = {
    "devices": Form("syncalgos", (OWN, "devices"), PLAIN),
    "processes": Form("syncalgos", (OWN, "processes"), PLAIN, 2),
    "alone": Form(
        "syncalgos",
        (OWN, "processes"),
        {"model_averaging": "alone:model_averaging"},
        2,
    ),
    "PyTorch": Form(
        "torch",
        ("benchmarks.peers.torch_gloo",),
        {"sync_sgd": "ddp", "model_averaging": "averager"},
    ),
}
TRIES = 3
FIRST = 300.0  # expected worker-steps/s, which sets the steps of the first try

COLUMNS = {
    "algorithm": "algorithm",
    "form": "form",
    "workers": "workers",
    "worker-steps/s": "worker_steps_per_second",
    "times one worker": "times",
    "efficiency": "efficiency",
    "times PyTorch": lambda one: one.get("to_torch", ""),
}
Case = tuple[str, str, int]  # algorithm, form, workers


def cases(algorithms: Sequence[str], workers: Sequence[int], torch: bool) -> list[Case]:
    """All that is measured in a turn."""
    return [
        (algorithm, name, count)
        for algorithm in algorithms
        for count in workers
        for name, form in FORMS.items()
        if algorithm in form.algorithms
        and count >= form.least
        and (torch or form.library != "torch")
    ]


def measured(case: Case, steps: int, seconds: float, python: str) -> tuple[int, float]:
    """Measures once, and again with more steps if it took less than `seconds`.

    Returns:
        The number of steps, and the seconds that they took.

    Raises:
        RuntimeError: it failed TRIES times; each failure is reported.
    """
    algorithm, name, workers = case
    form = FORMS[name]
    # The devices of a process share XLA's threads.
    threads = workers if name == "devices" else 1
    words = [*form.words, form.algorithms[algorithm], str(workers)]
    failures = 0
    while True:
        command = ["env", f"NPROC={threads}", python, "-m", *words, str(steps)]
        try:
            found = run(command, 1, timeout=180)
        except RuntimeError as error:
            failures += 1  # PyTorch with two workers aborted occasionally
            report({"benchmark": "scale", "case": case, "failed": str(error)})
            if failures == TRIES:
                raise
            continue
        if found >= seconds:
            return steps, found
        steps = max(2 * steps, steps_for("syncalgos", steps * workers / found, workers))


def measure_all(
    found: Sequence[Case], repeats: int, seconds: float, pythons: Mapping[str, str]
) -> dict[Case, list[float]]:
    """Returns the seconds per worker-step by case, each (repeats,)."""
    each: dict[Case, list[float]] = {case: [] for case in found}
    steps = {
        case: 64 if seconds < LEAST else steps_for("syncalgos", FIRST, case[2])
        for case in found
    }
    for turn in range(repeats):
        for case in found[:: -1 if turn % 2 else 1]:
            python = pythons[FORMS[case[1]].library]
            steps[case], taken = measured(case, steps[case], seconds, python)
            each[case].append(taken / (steps[case] * case[2]))
    return each


def summary(case: Case, each: Mapping[Case, list[float]]) -> dict[str, Any]:
    """Returns the record of a case over all turns."""
    algorithm, name, workers = case
    own = each[case]
    record = {
        "benchmark": "scale",
        "algorithm": algorithm,
        "form": name,
        "workers": workers,
        "cores": CORES,
        "turns": [round(1 / s, 1) for s in own],
        "worker_steps_per_second": rates(own, 1),
        "times": "",
        "efficiency": "",
    }
    one = (algorithm, "PyTorch" if name == "PyTorch" else "devices", 1)
    if one in each:
        ideal = min(workers, CORES)
        record["times"] = ratios(own, each[one])
        record["efficiency"] = ratios([s * ideal for s in own], each[one])
    theirs = (algorithm, "PyTorch", workers)
    if theirs in each and name not in ("PyTorch", "alone"):
        record["to_torch"] = ratios(own, each[theirs])
    return record


def main() -> None:
    """Prints a record for each case, then a table."""
    parser = argparse.ArgumentParser(description="Compare scaling with PyTorch's.")
    parser.add_argument("--environment", type=Path, help="folder to install PyTorch in")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--algos", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--repeats", type=int, default=3, help="number of turns")
    parser.add_argument(
        "--seconds", type=float, default=LEAST, help="minimum seconds per measurement"
    )
    flags = parser.parse_args()
    pythons = {"syncalgos": sys.executable}
    if flags.environment is not None:
        directory = flags.environment.absolute()
        versions, missing = prepare(directory, peers=["torch"])
        pythons |= dict.fromkeys(versions, str(directory / "bin" / "python"))
        report({"benchmark": "scale", "versions": versions, "skipped": missing})
    found = cases(flags.algos, flags.workers, "torch" in pythons)
    each = measure_all(found, flags.repeats, flags.seconds, pythons)
    print(table_of(COLUMNS, [report(summary(case, each)) for case in each]))


if __name__ == "__main__":
    main()
