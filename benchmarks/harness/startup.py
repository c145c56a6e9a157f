"""Start-up times of the harness: `python -m benchmarks.harness.startup`.

Every command runs in a separate process, one after the other in every turn. It measures
`--help`, two imports, and short runs of tasks with bmuf: the seconds from the start of
the process to the first line of progress on stderr (its first evaluation, after
`--first` local steps) and to its end. "off" has no compilation cache, "cold" an empty
one, and "second" the one that the cold run of the same turn has filled. A task whose
data is missing is left out.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import report, spread, table

PROGRAM = ["-m", "experiments.run"]
BARE = {
    "--help": [*PROGRAM, "--help"],
    "import syncalgos": ["-c", "import syncalgos"],
    "import jax, optax": ["-c", "import jax, optax"],
}
KINDS = ("off", "cold", "second")


def environment(folder: Path, cached: bool) -> dict[str, str]:
    """Returns the user's environment, with a compilation cache in a folder or none."""
    own = {"JAX_COMPILATION_CACHE_DIR": str(folder)}
    own |= {"JAX_ENABLE_COMPILATION_CACHE": str(cached).lower()}
    return {**os.environ, **own}


def timed(arguments: Sequence[str], environ: dict[str, str]) -> tuple[float, float]:
    """Runs Python; returns seconds to the first "step" line on stderr, and to the end.

    Raises:
        RuntimeError: the command failed; the message is its last lines.
    """
    start, said = time.perf_counter(), []
    with subprocess.Popen(
        [sys.executable, *arguments],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append((time.perf_counter() - start, line))
    end = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError("".join(line for _, line in said[-3:]))
    steps = (seconds for seconds, line in said if line.startswith("step "))
    return next(steps, float("nan")), end


def run(task: str, steps: int, first: int, out: Path) -> list[str]:
    """Returns the arguments of a run that is evaluated every `first` steps."""
    words = f"--algo bmuf --task {task} --steps {steps} --eval-every {first}"
    return [*PROGRAM, *words.split(), "--out", str(out), "--overwrite"]


def turn(task: str, steps: int, first: int) -> dict[str, tuple[float, float]]:
    """Returns the seconds of one turn of a task, by kind of cache."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), {}
        arguments = run(task, steps, first, folder / "out")
        for kind in KINDS:
            found[kind] = timed(arguments, environment(folder / "cache", kind != "off"))
    return found


def main() -> None:
    """Prints a JSON line for each command as it is done, and a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", default="digits,fashion_mnist")
    parser.add_argument("--steps", type=int, default=64, help="local steps of a run")
    parser.add_argument("--first", type=int, default=16, help="steps per evaluation")
    s = parser.parse_args()
    rows = []

    def add(name, kind, ends, firsts=None):
        to_end, to_first = spread(ends), None if firsts is None else spread(firsts)
        report({"command": name, "cache": kind, "end": to_end, "first": to_first})
        rows.append([name, kind, to_first or "", to_end])

    own = {**os.environ}
    bare = [
        {name: timed(arguments, own)[1] for name, arguments in BARE.items()}
        for _ in range(s.repeats)
    ]
    for name in BARE:
        add(name, "", [one[name] for one in bare])
    for task in s.tasks.split(","):
        try:
            turns = [turn(task, s.steps, s.first) for _ in range(s.repeats)]
        except RuntimeError as error:
            report({"command": task, "left_out": str(error)})
            continue
        for kind in KINDS:
            firsts, ends = zip(*(found[kind] for found in turns), strict=True)
            add(task, kind, ends, firsts)
    print(table(["command", "cache", "to the first line, s", "to the end, s"], rows))


if __name__ == "__main__":
    main()
