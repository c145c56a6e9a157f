"""The harness's own share of a run: `python -m benchmarks.harness.overhead`.

Runs of each task by bmuf, in this process, with the harness's own loop. The clock
starts at the first evaluation, when all programs are compiled. Time that passes outside
of `DataParallel.run` and of an evaluation's programs is the harness's: rows, records,
and, in the rows with checkpoints, saving to a temporary folder. Every turn has a run of
each kind. An evaluation computes what the user asked for, so it is a column of its own.
A task whose data is missing is left out.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks.measure import report, spread, table
from experiments.checkpoint.background import Background
from experiments.checkpoint.manager import FOLDER, CheckpointManager
from experiments.cli.errors import BadRequest
from experiments.training.config import parse
from experiments.training.prepared import PreparedRun, prepare, train_and_record
from experiments.training.records import Progress

# Steps between evaluations and between checkpoints, those of a run, and flags.
TASKS = {
    "digits": (48, 480, 2400, ""),
    "mnist": (64, 64, 256, ""),
    "fashion_mnist": (64, 64, 640, "--model mlp"),
    "spoken_digits": (32, 32, 96, ""),
    "embeddings": (64, 64, 256, ""),
    "shakespeare": (8, 8, 24, ""),
}
WORKERS = 8


class Clock:
    """Seconds of a run by who spent them, from the first evaluation to the end."""

    def __init__(self, run: PreparedRun):
        self.spent: dict[str, float] = {"run": 0.0, "evaluation": 0.0, "save": 0.0}
        self.until_end: dict[str, float] = {}
        self.start, self.end = math.nan, math.nan
        self._timed(run.trainer, "run", "run")
        self._timed(run.trainer, "evaluate", "evaluation")
        self._timed(run.trainer, "divergence", "evaluation")

    def _timed(self, trainer: Any, name: str, who: str) -> None:
        setattr(trainer, name, self.watched(getattr(trainer, name), who))

    def watched(self, call: Callable[..., Any], who: str) -> Callable[..., Any]:
        """Returns a function whose seconds, with what it computes, are counted."""

        def timed(*arguments):
            start = time.perf_counter()
            result = jax.block_until_ready(call(*arguments))
            self.spent[who] += time.perf_counter() - start
            return result

        return timed

    def step(self, done: int, loss: float) -> None:
        """Takes what the terminal would show; a report of the loop has it."""

    def line(self, text: str) -> None:
        """Starts at the first evaluation; the last one is the end."""
        self.end = time.perf_counter()
        if math.isnan(self.start):
            self.start = self.end
            self.spent = dict.fromkeys(self.spent, 0.0)
        self.until_end = {**self.spent}


def measure(task: str, saves: bool) -> dict[str, float]:
    """Seconds of a run, and the shares of its evaluations, saves and the rest."""
    every, between, steps, flags = TASKS[task]
    words = f"--algo bmuf --task {task} --workers {WORKERS} --steps {steps} {flags}"
    words += f" --eval-every {every}"
    words += f" --checkpoint-every {between}" if saves else ""
    with tempfile.TemporaryDirectory() as name:
        run = prepare(parse(words.split()))
        run.trainer.center(run.state)  # compiles what a checkpoint needs, too
        clock, out = Clock(run), Path(name)
        started = time.perf_counter()
        background = Background()
        manager = CheckpointManager(run, out / FOLDER, started, background, ("0",))
        save = clock.watched(manager.save, "save") if saves else None
        progress = Progress(run_id="0")
        train_and_record(run, out, clock, lambda: 0, save, progress)
        manager.background.wait()
        whole = clock.end - clock.start
        sizes = [x.stat().st_size for x in (out / FOLDER).glob("*.npz")]
    spent = {who: seconds / whole for who, seconds in clock.until_end.items()}
    rest = 1 - sum(spent.values())
    return {"seconds": whole, **spent, "rest": rest, "bytes": max(sizes, default=0)}


def main() -> None:
    """Prints a JSON line for each task as it is done, and a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", default=",".join(TASKS))
    s, rows = parser.parse_args(), []
    for task in s.tasks.split(","):
        try:
            turns = [
                {saves: measure(task, saves) for saves in (False, True)}
                for _ in range(s.repeats)
            ]
        except BadRequest as error:
            report({"task": task, "left_out": str(error)})
            continue
        for saves in (False, True):
            found = {
                name: spread([turn[saves][name] for turn in turns], 3)
                for name in turns[0][saves]
            }
            report({"task": task, "checkpoints": saves, **found})
            percent = [
                ", ".join(f"{100 * x:.1f}" for x in found[name])
                for name in ("evaluation", "save", "rest")
            ]
            kind = f"{found['bytes'][1] / 1e6:.1f} MB" if saves else "none"
            rows.append([task, kind, found["seconds"][1], *percent])
    heads = ["task", "checkpoints", "s", "evaluation, %", "saving, %", "rest, %"]
    print(table(heads, rows))


if __name__ == "__main__":
    main()
