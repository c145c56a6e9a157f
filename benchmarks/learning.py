"""Learning curves of every task, with four algorithms on one worker and on four.

`python -m benchmarks.learning` runs the command line as users do, one run after the
other, and adds a line per run to docs/records/learning.jsonl; recorded runs are not
repeated. Then it prints the tables of docs/measured.md and draws their curves; with
`--show` it does only that.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from experiments import files
from experiments.study import figures
from experiments.study.figures import Line, Plot

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = DOCS / "records" / "learning.jsonl"
CURVES = DOCS / "curves"

TASKS = {  # the measure of each task
    "digits": "test_accuracy",
    "mnist": "test_accuracy",
    "fashion_mnist": "test_accuracy",
    "spoken_digits": "test_accuracy",
    "shakespeare": "test_bits_per_character",
    "embeddings": "test_perplexity",
}
ALGORITHMS = ("sync_sgd", "model_averaging", "bmuf", "diloco")
WORKERS = (1, 4)
LONGER = (  # flags of longer runs, and the measure to report
    (
        "--task fashion_mnist --algo sync_sgd --workers 2 --batch-size 128 --lr 0.05 "
        "--schedule cosine --steps 6000 --eval-every 2000",
        "test_accuracy",
    ),
    ("--task spoken_digits --algo sync_sgd --workers 1", "test_accuracy"),
    (
        "--task shakespeare --algo sync_sgd --workers 2 --batch-size 32 --steps 2500 "
        "--eval-every 500",
        "test_loss",
    ),
    (
        "--task imagenet_synthetic --algo sync_sgd --workers 2 --eval-every 10",
        "train_loss",
    ),
)
SUMMARY_KEYS = (
    "task",
    "algo",
    "workers",
    "seed",
    "steps",
    "lr",
    "effective_lr",
    "seconds",
    "total_seconds",
    "bytes_per_worker",
)


def run_flags(task: str, algo: str, workers: int) -> str:
    """Returns the flags of a run; all others are the defaults."""
    return f"--task {task} --algo {algo} --workers {workers}"


def record_run(flags: str) -> dict[str, Any]:
    """Runs the command line with these flags.

    Raises:
        CalledProcessError: the exit code is not 0.
    """
    program = [sys.executable, "-m", "experiments.run"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        words = [*program, *shlex.split(flags), "--out", str(out)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return read_record(flags, out)


def read_record(flags: str, out: Path) -> dict[str, Any]:
    """Returns the record of a run, read from its files."""
    summary = json.loads((out / "summary.json").read_text())
    metrics = {
        key: value
        for key, value in summary.items()
        if key.startswith(("test_", "train_"))
    }
    curve = []
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        curve.append({key: row[key] for key in row if key == "step" or key in metrics})
    return {
        "command": f"python -m experiments.run {flags}",
        "date": time.strftime("%Y-%m-%d"),
        **{key: summary[key] for key in SUMMARY_KEYS},
        **metrics,
        "curve": curve,
    }


Record = dict[str, Any]


def records() -> dict[str, Record]:
    """Returns the recorded runs, by their command."""
    if not RECORDS.exists():
        return {}
    recorded_runs = map(json.loads, RECORDS.read_text().splitlines())
    return {record["command"]: record for record in recorded_runs}


def find_record(runs: dict[str, Record], flags: str) -> Record | None:
    """Returns the record of the run with these flags, if there is one."""
    return runs.get(f"python -m experiments.run {flags}")


def format_runs(runs: dict[str, Record]) -> str:
    """Returns a row per task and number of workers, with a column per algorithm."""
    rows = []
    for (task, metric), workers in product(TASKS.items(), WORKERS):
        cells = []
        steps = ""
        for algo in ALGORITHMS:
            record = find_record(runs, run_flags(task, algo, workers))
            cells.append(f"{record[metric]:.4g}" if record else "")
            if record and not steps:
                steps = str(record["steps"])
        head = ""
        if workers == WORKERS[0]:
            name = metric.removeprefix("test_").replace("_", " ")
            head = f"{task}: {name}, {steps} steps"
        rows.append([head, workers, *cells])
    return measure.format_rows(["task", "workers", *ALGORITHMS], rows)


def longer(runs: dict[str, Record]) -> str:
    """Returns a row for each of the longer runs."""
    rows = []
    for flags, metric in LONGER:
        record = find_record(runs, flags)
        if record:
            reached = f"{metric.replace('_', ' ')} {record[metric]:.4f}"
            rows.append([f"`{flags}`", reached, f"{record['total_seconds'] / 60:.0f}"])
    return measure.format_rows(["command", "reached", "minutes"], rows)


def draw(runs: dict[str, Record]) -> None:
    """Writes a picture per task: its measure over the local steps."""
    for task, metric in TASKS.items():
        lines = []
        algo_by_label = {}
        for algo, workers in product(ALGORITHMS, WORKERS):
            record = find_record(runs, run_flags(task, algo, workers))
            if not record:
                continue
            label = f"{algo}, {workers}"
            points = [(row["step"], row[metric]) for row in record["curve"]]
            x, y = np.array(points).T
            lines.append(Line(label, "", x, y, y, y))
            algo_by_label[label] = algo
        title = f"{task}: {metric.removeprefix('test_').replace('_', ' ')}"
        plot = Plot(task, "", f"{title}, by workers", lines, "local steps")
        with figures.style():
            figure = figures.draw(plot, figures.styles(algo_by_label))
            svg = figures.svg(plot, figure)
        files.write(CURVES / f"{task}.svg", svg)


def main() -> None:
    """Makes the missing runs, then shows all runs."""
    RECORDS.parent.mkdir(exist_ok=True)
    if "--show" not in sys.argv:
        _run_missing()
    runs = records()
    print(format_runs(runs), longer(runs), sep="\n\n")
    draw(runs)


def _run_missing() -> None:
    """Runs the commands that have no record yet, and appends their records."""
    runs = records()
    commands = [run_flags(*run) for run in product(TASKS, ALGORITHMS, WORKERS)]
    commands += [flags for flags, _ in LONGER]
    for flags in commands:
        if find_record(runs, flags):
            continue
        print(flags, flush=True)
        new_record = record_run(flags)
        with RECORDS.open("a") as file:
            file.write(json.dumps(new_record) + "\n")


if __name__ == "__main__":
    main()
