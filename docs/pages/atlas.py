"""Rows of the atlas: what each algorithm reached with an equal budget of trials."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.atlas import read_table
from experiments.command.terminal import format_bytes


class Atlas(NamedTuple):
    """A study in which all algorithms have the same budget.

    Attributes:
        folder: in docs/studies/.
        title: of its rows.
        measure: the columns to show begin with it.
        scale: 100 for shares that are shown in %.
        unit: of the measure.
        points: the unit of differences.
    """

    folder: str
    title: str
    measure: str = "test_accuracy"
    scale: float = 100
    unit: str = " %"
    points: str = " points"


ATLASES = (
    Atlas("atlas-mnist1d", "MNIST-1D, test accuracy"),
    Atlas("atlas-spoken-digits", "Spoken digits, test accuracy"),
    Atlas("atlas-gpt", "A small GPT, test loss", "test_loss", 1, "", ""),
)
Lines = Mapping[str, Mapping[str, str]]
# Each with the lines of its table by algorithm.
Tables = Sequence[tuple[Atlas, Lines]]
BASELINE = "sync_sgd"
HEAD = f"""\
| task and measure | reached | against `{BASELINE}` | most sent | learning rate |
|---|---|---|---|---|
"""


def read_all(studies: Path) -> Tables:
    """Reads the atlases that are there."""
    folders = [(atlas, studies / atlas.folder) for atlas in ATLASES]
    return [(atlas, read_table(folder)) for atlas, folder in folders if folder.exists()]


def algorithm_tables(algorithm: str, tables: Tables) -> str:
    """Returns the algorithm's rows of all atlases, or nothing."""
    rows = [
        table_line(lines[algorithm], atlas)
        for atlas, lines in tables
        if algorithm in lines
    ]
    return HEAD + "".join(rows) if rows else ""


def table_line(row: Mapping[str, str], atlas: Atlas) -> str:
    """Returns a line of one atlas."""
    cells = [
        atlas.title,
        reached(row, atlas),
        difference(row, atlas),
        format_bytes(float(row["bytes_per_worker"]))
        if row["bytes_per_worker"]
        else "–",
        f"{float(row['lr']):.3g}",
    ]
    return f"| {' | '.join(cells)} |\n"


def reached(row: Mapping[str, str], atlas: Atlas) -> str:
    """Returns the mean and the standard deviation at the end."""
    mean = row[f"{atlas.measure}_mean"]
    deviation = row[f"{atlas.measure}_sd"]
    if not mean:
        return f"{row['diverged']} of {row['seeds']} runs diverged"
    places = 1 if atlas.scale == 100 else 3
    return (
        f"{atlas.scale * float(mean):.{places}f} ± "
        f"{atlas.scale * float(deviation):.{places}f}{atlas.unit}"
    )


def difference(row: Mapping[str, str], atlas: Atlas) -> str:
    """Returns the difference from the baseline, with its interval."""
    if not row["difference_mean"]:
        return "–"
    places = 1 if atlas.scale == 100 else 3
    mean, low, high = (
        f"{atlas.scale * float(row[f'difference_{key}']):+.{places}f}"
        for key in ("mean", "low", "high")
    )
    return f"{mean}{atlas.points} [{low}, {high}]"
