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
KEPT = ("steps", "lr", "effective_lr", "seconds", "total_seconds", "bytes_per_worker")


def command(task: str, algo: str, workers: int) -> str:
    """Returns the flags of a run; all others are the defaults."""
    return f"--task {task} --algo {algo} --workers {workers}"


def record(flags: str) -> dict[str, Any]:
    """Runs the command line with these flags.

    Raises:
        CalledProcessError: the exit code is not 0.
    """
    program = [sys.executable, "-m", "experiments.run"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        words = [*program, *shlex.split(flags), "--out", str(out)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return read(flags, out)


def read(flags: str, out: Path) -> dict[str, Any]:
    """Returns the record of a run, read from its files."""
    summary = json.loads((out / "summary.json").read_text())
    lines = (out / "metrics.jsonl").read_text().splitlines()
    measured = {k: v for k, v in summary.items() if k.startswith(("test_", "train_"))}
    return {
        "command": f"python -m experiments.run {flags}",
        "date": time.strftime("%Y-%m-%d"),
        **{name: summary[name] for name in ("task", "algo", "workers", "seed", *KEPT)},
        **measured,
        "curve": [
            {k: v for k, v in json.loads(x).items() if k == "step" or k in measured}
            for x in lines
        ],
    }


def records() -> dict[str, dict[str, Any]]:
    """Returns the recorded runs, by their command."""
    if not RECORDS.exists():
        return {}
    made = map(json.loads, RECORDS.read_text().splitlines())
    return {one["command"]: one for one in made}


def found(made: dict[str, dict[str, Any]], flags: str) -> dict[str, Any] | None:
    """Returns the record of the run with these flags, if there is one."""
    return made.get(f"python -m experiments.run {flags}")


def table(made: dict[str, dict[str, Any]]) -> str:
    """Returns a row per task and number of workers, with a column per algorithm."""
    rows = []
    for (task, figure), workers in product(TASKS.items(), WORKERS):
        runs = [found(made, command(task, algo, workers)) for algo in ALGORITHMS]
        shown = [f"{one[figure]:.4g}" if one else "" for one in runs]
        steps = next((str(one["steps"]) for one in runs if one), "")
        name = figure.removeprefix("test_").replace("_", " ")
        head = f"{task}: {name}, {steps} steps" if workers == WORKERS[0] else ""
        rows.append([head, workers, *shown])
    return measure.table(["task", "workers", *ALGORITHMS], rows)


def longer(made: dict[str, dict[str, Any]]) -> str:
    """Returns a row for each of the longer runs."""
    rows = []
    for flags, figure in LONGER:
        if one := found(made, flags):
            reached = f"{figure.replace('_', ' ')} {one[figure]:.4f}"
            rows.append([f"`{flags}`", reached, f"{one['total_seconds'] / 60:.0f}"])
    return measure.table(["command", "reached", "minutes"], rows)


def draw(made: dict[str, dict[str, Any]]) -> None:
    """Writes a picture per task: its measure over the local steps."""
    for task, figure in TASKS.items():
        lines, algos = [], {}
        for algo, workers in product(ALGORITHMS, WORKERS):
            if one := found(made, command(task, algo, workers)):
                label, curve = f"{algo}, {workers}", one["curve"]
                x, y = np.array([(line["step"], line[figure]) for line in curve]).T
                lines.append(Line(label, "", x, y, y, y))
                algos[label] = algo
        title = f"{task}: {figure.removeprefix('test_').replace('_', ' ')}"
        plot = Plot(task, "", f"{title}, by workers", lines, "local steps")
        with figures.style():
            drawn = figures.svg(plot, figures.draw(plot, figures.styles(algos)))
        files.write(CURVES / f"{task}.svg", drawn)


def main() -> None:
    """Makes the missing runs, then shows all runs."""
    made = records()
    RECORDS.parent.mkdir(exist_ok=True)
    wanted = [command(*each) for each in product(TASKS, ALGORITHMS, WORKERS)]
    wanted += [flags for flags, _ in LONGER]
    for flags in wanted if "--show" not in sys.argv else ():
        if found(made, flags):
            continue
        print(flags, flush=True)
        one = record(flags)
        with RECORDS.open("a") as file:
            file.write(json.dumps(one) + "\n")
    made = records()
    print(table(made), longer(made), sep="\n\n")
    draw(made)


if __name__ == "__main__":
    main()
