r"""Joins the tables of several studies, to show which algorithm is fast on a network.

    python -m benchmarks.harness.atlas docs/studies/atlas-mnist1d \
        docs/studies/atlas-spoken-digits

reads the table.csv of each folder, and prints one table of all algorithms with their
scores over all workloads (each a study on a network). Studies that sweep a flag have
several lines per algorithm, and are refused.
"""

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.command.errors import BadRequest

TIME = "seconds to target: "
FIRST = "sync_sgd"  # other algorithms' bytes are relative to its bytes
MOST = 4.0  # times as long as the fastest, at which a score is 0

Lines = Mapping[str, Mapping[str, str]]
# Times to the target by label, by workload; None where it is never reached.
Times = Mapping[str, Mapping[str, float | None]]


def read(folder: Path) -> Lines:
    """Returns the lines of a study's table by algorithm.

    Raises:
        BadRequest: an algorithm has several lines.
    """
    with (folder / "table.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    found = {line["algorithm"]: line for line in lines}
    if len(found) < len(lines):
        raise BadRequest(f"{folder} sweeps a flag, but an atlas takes no sweeps")
    return found


def joined(folders: Sequence[Path]) -> dict[str, Lines]:
    """Returns the tables of studies by the studies' names."""
    return {x.name.removeprefix("atlas-"): read(x) for x in folders}


def times_of(studies: Mapping[str, Lines]) -> Times:
    """Returns the times to the target by algorithm, by workload: "mnist1d: dsl"."""
    return {
        f"{name}: {head.removeprefix(TIME)}": {
            label: float(line[head]) if line[head] else None
            for label, line in lines.items()
        }
        for name, lines in studies.items()
        for head in next(iter(lines.values()))
        if head.startswith(TIME)
    }


def scores(times: Times) -> dict[str, float]:
    """Returns the score of each algorithm, best first.

    On a workload it is 1 for the fastest, falls in proportion to the time, and is 0
    from `MOST` times the fastest's time on. The mean counts workloads on which any
    algorithm reaches the target.
    """
    found = {label: [] for own in times.values() for label in own}
    for own in times.values():
        fastest = min((x for x in own.values() if x is not None), default=0.0)
        for label, each in found.items() if fastest else ():
            ratio = (own.get(label) or math.inf) / fastest
            each.append(max(MOST - ratio, 0.0) / (MOST - 1))
    means = {label: float(np.mean(each)) for label, each in found.items() if each}
    return dict(sorted(means.items(), key=lambda x: -x[1]))


def end(line: Mapping[str, str] | None) -> str:
    """Returns the final measure of a study's runs, and how many diverged."""
    if line is None:
        return ""
    key = next(head for head in line if head.endswith("_mean"))
    if not line[key]:
        return "diverged"
    mean, deviation = (float(line[key.replace("mean", x)]) for x in ("mean", "sd"))
    factor = 100 if "accuracy" in key else 1
    lost = int(line["diverged"])
    gone = f" ({lost} of {line['seeds']} diverged)" if lost else ""
    return f"{mean * factor:.4g} ± {deviation * factor:.2g}{gone}"


def sent(lines: Lines, label: str) -> str:
    """Returns a worker's bytes relative to those of `FIRST`; "" if not counted."""
    both = [lines.get(x, {}).get("bytes_per_worker") for x in (label, FIRST)]
    if not all(both):
        return ""
    own, first = (float(x or 0) for x in both)
    return f"{own / first:.2g}"


def table(studies: Mapping[str, Lines]) -> list[str]:
    """Returns a Markdown table, the algorithm with the best score first."""
    times = times_of(studies)
    networks = dict.fromkeys(name.partition(": ")[2] for name in times)
    total, first = scores(times), next(iter(studies.values()))
    own = {
        network: scores(
            {k: x for k, x in times.items() if k.partition(": ")[2] == network}
        )
        for network in networks
    }
    heads = ["algorithm", *studies, "sends", "score", *networks]
    rows = [heads, ["---", *["--:"] * (len(heads) - 1)]]
    for label, score in total.items():
        ends = [end(lines.get(label)) for lines in studies.values()]
        parts = [f"{own[network].get(label, 0.0):.2f}" for network in networks]
        rows += [[f"`{label}`", *ends, sent(first, label), f"{score:.2f}", *parts]]
    return [f"| {' | '.join(row)} |" for row in rows]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    print("\n".join(table(joined(parser.parse_args(argv).folders))))


if __name__ == "__main__":
    main()
