"""Start-up times of the harness: `python -m benchmarks.harness.startup`.

Every command runs in a separate process, one after the other in every turn. It measures
`--help`, two imports, and short runs of tasks with bmuf: the seconds from the start of
the process to the first line of progress on stderr (its first evaluation, after
`--first` local steps) and to its end. "off" has no compilation cache, "cold" an empty
one, and "second" the one that the cold run of the same turn has filled. A task whose
data is missing is left out.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import format_rows, print_record, summarize_spread

PROGRAM = ["-m", "experiments.run"]
BARE = {
    "--help": [*PROGRAM, "--help"],
    "import syncalgos": ["-c", "import syncalgos"],
    "import jax, optax": ["-c", "import jax, optax"],
}
KINDS = ("off", "cold", "second")


def environment(folder: Path, cached: bool) -> dict[str, str]:
    """Returns the user's environment, with a compilation cache in a folder or none."""
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_ENABLE_COMPILATION_CACHE": str(cached).lower(),
    }


class Seconds(NamedTuple):
    """The seconds of a command to its first "step" line on stderr, and to its end."""

    first_line: float  # nan without such a line
    end: float


def time_command(arguments: Sequence[str], environ: dict[str, str]) -> Seconds:
    """Runs Python, and times it.

    Raises:
        RuntimeError: the command failed; the message is its last lines.
    """
    lines = []
    first_line = float("nan")
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step ") and math.isnan(first_line):
                first_line = time.perf_counter() - start
            lines.append(line)
    end = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError("".join(lines[-3:]))
    return Seconds(first_line, end)


def run_arguments(task: str, steps: int, eval_every: int, out: Path) -> list[str]:
    """Returns the arguments of a run that is evaluated every `eval_every` steps."""
    flags = f"--algo bmuf --task {task} --steps {steps} --eval-every {eval_every}"
    return [*PROGRAM, *flags.split(), "--out", str(out), "--overwrite"]


def time_turn(task: str, steps: int, eval_every: int) -> dict[str, Seconds]:
    """Returns the seconds of one turn of a task, by kind of cache."""
    seconds = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = run_arguments(task, steps, eval_every, folder / "out")
        for kind in KINDS:
            environ = environment(folder / "cache", cached=kind != "off")
            seconds[kind] = time_command(arguments, environ)
    return seconds


def main() -> None:
    """Prints a JSON line for each command as it is done, and a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", default="digits,fashion_mnist")
    parser.add_argument("--steps", type=int, default=64, help="local steps of a run")
    parser.add_argument("--first", type=int, default=16, help="steps per evaluation")
    flags = parser.parse_args()
    rows = []

    def add_row(
        name: str, kind: str, ends: list[float], first_lines: list[float] | None = None
    ) -> None:
        end_spread = summarize_spread(ends)
        first_spread = None if first_lines is None else summarize_spread(first_lines)
        print_record(
            {"command": name, "cache": kind, "end": end_spread, "first": first_spread}
        )
        rows.append([name, kind, first_spread or "", end_spread])

    bare_seconds: dict[str, list[float]] = {name: [] for name in BARE}
    for _ in range(flags.repeats):
        for name, arguments in BARE.items():
            bare_seconds[name].append(time_command(arguments, {**os.environ}).end)
    for name, ends in bare_seconds.items():
        add_row(name, "", ends)
    for task in flags.tasks.split(","):
        try:
            turns = [
                time_turn(task, flags.steps, flags.first) for _ in range(flags.repeats)
            ]
        except RuntimeError as error:
            print_record({"command": task, "left_out": str(error)})
            continue
        for kind in KINDS:
            first_lines = [turn[kind].first_line for turn in turns]
            add_row(task, kind, [turn[kind].end for turn in turns], first_lines)
    print(
        format_rows(["command", "cache", "to the first line, s", "to the end, s"], rows)
    )


if __name__ == "__main__":
    main()
