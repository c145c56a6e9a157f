r"""Joins the tables of several studies, to show which algorithm is fast on a network.

    python -m benchmarks.harness.atlas docs/studies/atlas-mnist1d \
        docs/studies/atlas-spoken-digits --out docs/studies/atlas

reads the table.csv of each folder, prints one table of all algorithms, and writes a
figure of performance profiles over all workloads (each a study on a network). Studies
that sweep a flag have several lines per algorithm, and are refused.
"""

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.cli.errors import BadRequest
from experiments.study.analysis.profiles import Times, profiles
from experiments.study.report import figures
from experiments.study.report.plots import profiles as figure
from experiments.study.report.styles import styles
from experiments.training import records

TIME = "seconds to target: "
FIRST = "sync_sgd"  # other algorithms' bytes are relative to its bytes

Lines = Mapping[str, Mapping[str, str]]


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


def times_of(studies: Mapping[str, Lines]) -> dict[str, dict[str, float | None]]:
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
    """Returns the score of each algorithm."""
    return {profile.label: profile.score for profile in profiles(times)}


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


def draw(studies: Mapping[str, Lines], out: Path) -> Path:
    """Writes the figure of profiles into a folder; returns its file."""
    times = times_of(studies)
    found = profiles(times)
    look = styles({profile.label: profile.label for profile in found})
    plot = figure.plot(found, look, "; ".join(times))
    with figures.style():
        file, _ = figures.pictures(plot, plot.draw())
    path = out / f"{plot.name}.svg"
    records.write(path, file)
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    config = parser.parse_args(argv)
    studies = joined(config.folders)
    print("\n".join(table(studies)))
    config.out.mkdir(parents=True, exist_ok=True)
    draw(studies, config.out)


if __name__ == "__main__":
    main()
