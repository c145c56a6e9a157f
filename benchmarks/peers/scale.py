"""More workers of one device, beside PyTorch: `python -m benchmarks.peers.scale`.

The work of `benchmarks.peers`, 32 examples a worker and step, so the ideal rate grows
with the workers up to the number of cores. A worker of syncalgos is a virtual device of
one process, or a process ("processes") that talks to the others by gloo; PyTorch's are
processes with gloo. All have one thread a worker. "alone" are processes that train
without talking: what the machine gives so many of them.

Each measurement is a process started for it, or several, and counts training alone;
forms run in turn, every other turn backwards, and ratios are taken within a turn.
`times` is a rate by that of one worker of the same library; `efficiency` divides it by
the workers, or by the cores where these are fewer: such workers take turns on them.

Without --environment, where PyTorch is installed if it is missing, its forms are left
out.
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
    """One way of having workers.

    Attributes:
        library: whose.
        words: of the module that trains, and what comes before its algorithm.
        algorithms: by name of syncalgos, as the module calls them.
        least: workers from which it is measured; the other forms of its library have
            the same single worker.
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
FIRST = 300.0  # worker-steps/s to expect of a form; it sets the steps of the first try

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
    """Measures once, and again with more steps where it did not last so long.

    Returns:
        The steps taken, and the seconds.

    Raises:
        RuntimeError: it failed as often as TRIES; each failure is reported.
    """
    algorithm, name, workers = case
    form = FORMS[name]
    # XLA has its threads for all devices of a process.
    threads = workers if name == "devices" else 1
    words = [*form.words, form.algorithms[algorithm], str(workers)]
    failures = 0
    while True:
        command = ["env", f"NPROC={threads}", python, "-m", *words, str(steps)]
        try:
            found = run(command, 1, timeout=180)
        except RuntimeError as error:
            failures += 1  # PyTorch with two workers aborted now and then
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
    """Returns the seconds of a worker-step by case, (repeats,)."""
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
    """A case's record, of all turns."""
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
    parser = argparse.ArgumentParser(description="More workers, beside PyTorch.")
    parser.add_argument("--environment", type=Path, help="PyTorch's")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--algorithms", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    parser.add_argument(
        "--seconds", type=float, default=LEAST, help="of a measurement at least"
    )
    flags = parser.parse_args()
    pythons = {"syncalgos": sys.executable}
    if flags.environment is not None:
        directory = flags.environment.absolute()
        versions, missing = prepare(directory, peers=["torch"])
        pythons |= dict.fromkeys(versions, str(directory / "bin" / "python"))
        report({"benchmark": "scale", "versions": versions, "skipped": missing})
    found = cases(flags.algorithms, flags.workers, "torch" in pythons)
    each = measure_all(found, flags.repeats, flags.seconds, pythons)
    print(table_of(COLUMNS, [report(summary(case, each)) for case in each]))


if __name__ == "__main__":
    main()
