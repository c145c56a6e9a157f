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
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import print_record, rates, ratios, table_of_records
from benchmarks.peers.__main__ import MIN_SECONDS, run_contestant, steps_for
from benchmarks.peers.setup import prepare

CORES = os.cpu_count() or 1


class Form(NamedTuple):
    """A form of workers.

    Attributes:
        library: the library that trains.
        words: the module that trains, and its arguments before the algorithm.
        algorithms: the module's names of algorithms, by name in syncalgos.
        min_workers: smallest measured number of workers; with a single worker the form
            equals another one of its library.
    """

    library: str
    words: Sequence[str]
    algorithms: Mapping[str, str]
    min_workers: int = 1


WORKERS_MODULE = "benchmarks.peers.own_workers"
NAMES = ("sync_sgd", "model_averaging")
PLAIN = {name: name for name in NAMES}
FORMS = {
    "devices": Form("syncalgos", (WORKERS_MODULE, "devices"), PLAIN),
    "processes": Form("syncalgos", (WORKERS_MODULE, "processes"), PLAIN, 2),
    "alone": Form(
        "syncalgos",
        (WORKERS_MODULE, "processes"),
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
FIRST_RATE = 300.0  # expected worker-steps/s, which sets the steps of the first try

COLUMNS = {
    "algorithm": "algorithm",
    "form": "form",
    "workers": "workers",
    "worker-steps/s": "worker_steps_per_second",
    "times one worker": "times",
    "efficiency": "efficiency",
    "times PyTorch": lambda record: record.get("to_torch", ""),
}


class ScaleCase(NamedTuple):
    """A case to measure; `form` is a name in FORMS."""

    algorithm: str
    form: str
    workers: int


class Measurement(NamedTuple):
    """Steps, and the seconds that they took."""

    steps: int
    seconds: float


def make_cases(
    algorithms: Sequence[str], workers: Sequence[int], torch: bool
) -> list[ScaleCase]:
    """All that is measured in a turn."""
    cases = []
    for algorithm, count, name in itertools.product(algorithms, workers, FORMS):
        form = FORMS[name]
        is_installed = torch or form.library != "torch"
        has_algorithm = algorithm in form.algorithms
        if is_installed and has_algorithm and count >= form.min_workers:
            cases.append(ScaleCase(algorithm, name, count))
    return cases


def measure_case(
    case: ScaleCase, steps: int, seconds: float, python: str
) -> Measurement:
    """Measures once, and again with more steps if it took less than `seconds`.

    Raises:
        RuntimeError: it failed TRIES times; each failure is reported.
    """
    form = FORMS[case.form]
    # The devices of a process share XLA's threads.
    threads = case.workers if case.form == "devices" else 1
    words = [*form.words, form.algorithms[case.algorithm], str(case.workers)]
    failures = 0
    while True:
        command = ["env", f"NPROC={threads}", python, "-m", *words, str(steps)]
        try:
            run_seconds = run_contestant(command, 1, timeout=180)
        except RuntimeError as error:
            failures += 1  # PyTorch with two workers aborted occasionally
            print_record({"benchmark": "scale", "case": case, "failed": str(error)})
            if failures == TRIES:
                raise
            continue
        if run_seconds >= seconds:
            return Measurement(steps, run_seconds)
        rate = steps * case.workers / run_seconds
        steps = max(2 * steps, steps_for("syncalgos", rate, case.workers))


def measure_all(
    cases: Sequence[ScaleCase], repeats: int, seconds: float, pythons: Mapping[str, str]
) -> dict[ScaleCase, list[float]]:
    """Returns the seconds per worker-step by case, each (repeats,)."""
    seconds_by_case: dict[ScaleCase, list[float]] = {case: [] for case in cases}
    steps = {}
    for case in cases:
        steps[case] = 64
        if seconds >= MIN_SECONDS:
            steps[case] = steps_for("syncalgos", FIRST_RATE, case.workers)
    for turn in range(repeats):
        for case in cases[:: -1 if turn % 2 else 1]:
            python = pythons[FORMS[case.form].library]
            measurement = measure_case(case, steps[case], seconds, python)
            steps[case] = measurement.steps
            worker_steps = measurement.steps * case.workers
            seconds_by_case[case].append(measurement.seconds / worker_steps)
    return seconds_by_case


def summary(
    case: ScaleCase, seconds_by_case: Mapping[ScaleCase, list[float]]
) -> dict[str, Any]:
    """Returns the record of a case over all turns."""
    seconds = seconds_by_case[case]
    record = {
        "benchmark": "scale",
        "algorithm": case.algorithm,
        "form": case.form,
        "workers": case.workers,
        "cores": CORES,
        "turns": [round(1 / turn_seconds, 1) for turn_seconds in seconds],
        "worker_steps_per_second": rates(seconds, 1),
        "times": "",
        "efficiency": "",
    }
    base_form = "PyTorch" if case.form == "PyTorch" else "devices"
    base = ScaleCase(case.algorithm, base_form, workers=1)
    if base in seconds_by_case:
        ideal = min(case.workers, CORES)
        record["times"] = ratios(seconds, seconds_by_case[base])
        core_seconds = [turn_seconds * ideal for turn_seconds in seconds]
        record["efficiency"] = ratios(core_seconds, seconds_by_case[base])
    torch_case = case._replace(form="PyTorch")
    if torch_case in seconds_by_case and case.form not in ("PyTorch", "alone"):
        record["to_torch"] = ratios(seconds, seconds_by_case[torch_case])
    return record


def main() -> None:
    """Prints a record for each case, then a table."""
    parser = argparse.ArgumentParser(description="Compare scaling with PyTorch's.")
    parser.add_argument("--environment", type=Path, help="folder to install PyTorch in")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--algos", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--repeats", type=int, default=3, help="number of turns")
    parser.add_argument(
        "--seconds",
        type=float,
        default=MIN_SECONDS,
        help="minimum seconds per measurement",
    )
    flags = parser.parse_args()
    pythons = {"syncalgos": sys.executable}
    if flags.environment is not None:
        directory = flags.environment.absolute()
        versions, reasons = prepare(directory, peers=["torch"])
        pythons |= dict.fromkeys(versions, str(directory / "bin" / "python"))
        print_record({"benchmark": "scale", "versions": versions, "skipped": reasons})
    cases = make_cases(flags.algos, flags.workers, torch="torch" in pythons)
    seconds = measure_all(cases, flags.repeats, flags.seconds, pythons)
    print(
        table_of_records(
            COLUMNS, [print_record(summary(case, seconds)) for case in cases]
        )
    )


if __name__ == "__main__":
    main()
