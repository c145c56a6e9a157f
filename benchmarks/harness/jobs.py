"""Times studies by jobs: `python -m benchmarks.harness.jobs`.

It measures the time of one study, made by one process and by `--jobs 2` in turn; each
with an empty compilation cache ("cold"), and with the one that the cold study has
filled ("warm"). It checks that both give the same hashes.

It also simulates the time on many workers, with the plan that hands runs to jobs and
the measured seconds of a study's runs, and compares it with a lower bound. The bound is
the larger of two times: all training divided by the workers, and the longest trial plus
the longest final run of one variant.
"""

import argparse
import heapq
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import ratios, report, spread, table
from experiments.study.grid import RunSet
from experiments.study.running.maker import Made
from experiments.study.running.plan import Missing, Plan
from experiments.study.spec import Variant
from experiments.training.config import RunConfig

COMPARE = [sys.executable, "-m", "experiments.compare"]
STUDY = ["--algos", "sync_sgd,bmuf,diloco,easgd", "--seeds", "3"]
RECORDS = Path(__file__).parents[2] / "docs" / "studies"


class Cell(NamedTuple):
    """The measured runs of one command, in the order of their seeds.

    Attributes:
        compile: additional seconds of the first run, compared with the others.
        seconds: seconds of each run, without `compile`.
    """

    compile: float
    seconds: Sequence[float]


def cell(found: Sequence[float]) -> Cell:
    """Splits seconds into compilation and training; a single run is all training."""
    first, *later = found
    compile_ = max(0.0, first - sum(later) / len(later)) if later else 0.0
    return Cell(compile_, [first - compile_, *later])


def measured(study: Path) -> tuple[list[RunSet], dict[str, Cell], dict[str, str]]:
    """Reads a committed study.

    Returns:
        Its run sets, the cells by command, and the command of the final runs by label.
    """
    text = (study / "summaries.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    cells = {
        command: cell([row["total_seconds"] for row in own])
        for command, own in groupby(rows, key=lambda row: _command(row))
    }
    by_label: dict[str, list[str]] = {}
    for command in cells:
        label = re.sub(r" --(lr|validation) \S+", "", command)
        by_label.setdefault(label, []).append(command)
    sets, finals = [], {}
    for number, (label, commands) in enumerate(by_label.items()):
        made = RunSet(Variant(label, ""), number, "", RunConfig(), Path(), range(0))
        trials = [c for c in commands if "--validation" in c]
        [final] = [c for c in commands if "--validation" not in c]
        finals[label] = final
        sets.append(
            made._replace(
                seeds=range(len(cells[final].seconds)),
                trials=[
                    made._replace(
                        common=_of(c), seeds=range(1000, 1001), values={"c": str(i)}
                    )
                    for i, c in enumerate(trials)
                ],
            )
        )
    return sets, cells, finals


def _of(command: str) -> RunConfig:
    """Returns a config that stands for the runs of a command."""
    return RunConfig(arguments={"command": command})


def _command(row: Mapping[str, Any]) -> str:
    return re.sub(r" --seed \d+$", "", row["command"])


class _Job(NamedTuple):
    """A run in progress: its end, its number among all, its worker and the run."""

    end: float
    number: int
    worker: int
    run: Missing


def simulated(
    sets: Sequence[RunSet],
    cells: Mapping[str, Cell],
    finals: Mapping[str, str],
    workers: int,
) -> float:
    """Returns the seconds that a study takes on `workers` workers."""
    with tempfile.TemporaryDirectory() as folder:
        placed = [_placed(each, Path(folder)) for each in sets]
        plan = Plan(
            placed,
            lambda made: made._replace(common=_of(finals[made.variant.label])),
        )
        now, busy, begun = 0.0, list[_Job](), 0
        free: dict[int, int | None] = dict.fromkeys(range(workers))  # their last number
        compiled = set[tuple[str, bool]]()  # later runs read these from jax's cache
        while not plan.is_over:
            for worker, last in [*free.items()]:
                if (run := plan.take(last)) is None:
                    break
                program = run.runs.variant.label, run.runs.is_trial
                end = now + _seconds(run, cells, program not in compiled)
                compiled.add(program)
                heapq.heappush(busy, _Job(end, begun, worker, run))
                begun += 1
                del free[worker]
            job = heapq.heappop(busy)
            now, free[job.worker] = job.end, job.run.number
            plan.ended(job.run, Made(""))
        return now


def _placed(made: RunSet, folder: Path) -> RunSet:
    trials = [trial._replace(out=folder) for trial in made.trials]
    return made._replace(out=folder, trials=trials)


def _seconds(run: Missing, cells: Mapping[str, Cell], is_first: bool) -> float:
    """Returns the seconds of a run, which may compile."""
    own = cells[run.runs.common.arguments["command"]]
    return own.seconds[run.seed % 1000] + (own.compile if is_first else 0)


def bound(
    sets: Sequence[RunSet],
    cells: Mapping[str, Cell],
    finals: Mapping[str, str],
    workers: int,
) -> float:
    """Returns a lower bound on the seconds of any plan."""
    work = sum(sum(x.seconds) for x in cells.values()) / workers
    chains = [
        max(
            (max(cells[x.common.arguments["command"]].seconds) for x in made.trials),
            default=0.0,
        )
        + max(cells[finals[made.variant.label]].seconds)
        for made in sets
    ]
    return max(work, *chains)


def study(folder: Path, cache: Path, flags: Sequence[str]) -> float:
    """Makes a study, and returns its seconds.

    Raises:
        RuntimeError: the command failed; the message is its last line.
    """
    environ = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
    }
    start = time.perf_counter()
    ended = subprocess.run(
        [*COMPARE, *STUDY, *flags, "--out", str(folder)],
        env=environ,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr.splitlines()[-1])
    return time.perf_counter() - start


def hashes(folder: Path) -> dict[str, str]:
    """Returns the hashes of a study's runs, by the runs' folders."""
    return {
        str(path.relative_to(folder)): json.loads(path.read_text())["params_sha256"]
        for path in folder.rglob("summary.json")
    }


def measure(repeats: int, jobs: int) -> dict[str, list[float]]:
    """Returns the seconds of the study by kind, turn by turn."""
    ways: dict[str, list[str]] = {"serial": [], f"{jobs} jobs": ["--jobs", str(jobs)]}
    seconds: dict[str, list[float]] = {}
    for turn in range(repeats):
        with tempfile.TemporaryDirectory() as root:
            found = {}
            for name in sorted(ways, reverse=bool(turn % 2)):
                for kind in ("cold", "warm"):
                    out = Path(root, f"{name} {kind}")
                    taken = study(out, Path(root, f"cache {name}"), ways[name])
                    seconds.setdefault(f"{name}, {kind}", []).append(taken)
                    found[out.name] = hashes(out)
            first, *others = found.values()
            if any(other != first for other in others):
                raise RuntimeError("the studies have different params")
    return seconds


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--simulate-only", action="store_true")
    given = parser.parse_args()
    rows = []
    for folder in sorted(path.parent for path in RECORDS.glob("*/summaries.jsonl")):
        study_of = measured(folder)
        for workers in (1, 2, 4, 10, 30, 100, 300):
            taken, least = simulated(*study_of, workers), bound(*study_of, workers)
            record = {
                "benchmark": "jobs",
                "study": folder.name,
                "workers": workers,
                "seconds": round(taken, 1),
                "bound": round(least, 1),
                "ratio": round(taken / least, 3),
            }
            report(record)
            rows.append(
                [str(record[x]) for x in ("study", "workers", "seconds", "ratio")]
            )
    print(table(["study", "workers", "seconds", "over the lower bound"], rows))
    if given.simulate_only:
        return
    seconds = measure(given.repeats, given.jobs)
    for name, found in seconds.items():
        report({"benchmark": "jobs", "kind": name, "seconds": spread(found)})
    for kind in ("cold", "warm"):
        faster = ratios(
            seconds[f"{given.jobs} jobs, {kind}"], seconds[f"serial, {kind}"]
        )
        report({"benchmark": "jobs", "kind": kind, "jobs": given.jobs, "times": faster})


if __name__ == "__main__":
    main()
