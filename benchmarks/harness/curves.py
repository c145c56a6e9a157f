"""Shortens the evaluations of a study to a line per run, with a list per quantity.

    python -m benchmarks.harness.curves runs/STUDY test_accuracy bytes_per_worker

reads metrics.jsonl there, and prints the curves of these quantities with seven digits,
like float32. The output is about a tenth of the input. Committed studies have it as
curves.jsonl.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.study.runs import Lines


def compact(lines: Lines, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a line for each run, with the fields that identify the run."""

    def run_fields(line: Any) -> dict[str, Any]:
        return dict(itertools.takewhile(lambda item: item[0] != "step", line.items()))

    for fields, group in itertools.groupby(lines, run_fields):
        run_lines = list(group)
        curves = {}
        for key in keys:
            curves[key] = [round_float(line[key]) for line in run_lines]
        yield fields | curves


def round_float(value: Any) -> Any:
    """Returns a float with seven digits; other values do not change."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def evaluations(path: Path) -> list[dict[str, Any]]:
    """Reads curves.jsonl, and returns a line for each evaluation."""
    lines = []
    for text in path.read_text("utf-8").splitlines():
        run = json.loads(text)
        for i in range(len(run["step"])):
            line = {}
            for key, value in run.items():
                line[key] = value[i] if isinstance(value, list) else value
            lines.append(line)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("quantities", nargs="+")
    config = parser.parse_args(argv)
    lines = (config.folder / "metrics.jsonl").read_text("utf-8").splitlines()
    for run in compact([*map(json.loads, lines)], ["step", *config.quantities]):
        print(json.dumps(run))


if __name__ == "__main__":
    main()
