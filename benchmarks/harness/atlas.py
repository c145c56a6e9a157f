"""Tables of the atlas's page: every algorithm at its best, and after an equal time.

`benchmarks.harness.studies` makes them from the records of the atlas's studies, and
writes them beside these: verdicts.csv and equal-time.csv, which the page includes.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.study.results import Curve, Report, Row, Standing, classify_difference
from experiments.study.statistics import Measure

REFERENCE = "sync_sgd"  # other algorithms' bytes are relative to its bytes
CLOCK = "model_averaging"  # all have the time of its whole run
LINKS = {"10gbe": "10 GbE", "two-data-centres": "two data centres", "dsl": "DSL"}
VERDICTS = {
    Standing.WORSE: "a loss",
    Standing.BETTER: "a gain",
    Standing.EQUAL_DIFFERENCES: "",
    Standing.FEW_SEEDS: "",
    Standing.NO_COMMON_SEED: "",
}
# "No loss" means that the 95 % interval lies above this difference.
MARGINS = {"test_accuracy": -0.005, "test_loss": -0.02}


def verdict(row: Row, measure: Measure) -> str:
    """Returns "no loss", "a loss", "a gain" or "not resolved", as the preset says."""
    difference = row.comparison.difference
    standing = classify_difference(difference, measure)
    if difference is None or standing in VERDICTS:
        return VERDICTS[standing]
    ends = (difference.low or 0.0, difference.high or 0.0)
    worse_end = min(measure.side * end for end in ends)
    return "no loss" if worse_end > MARGINS[measure.key] else "not resolved"


def read(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """Returns the lines of a study's table by algorithm."""
    with (folder / "table.csv").open(newline="") as file:
        return {line["algorithm"]: line for line in csv.DictReader(file)}


def best_table(report: Report) -> list[str]:
    """Returns a Markdown table of all rows, the best first.

    Figures are in % and points, or in nats as they are. A star marks a value at an end
    of those that were tried.
    """
    measure = report.measure
    reference = next(row for row in report.rows if row.label == REFERENCE)
    edges = {(x.label, x.flag) for x in report.tuning if x.at_edge}

    def cells(row: Row) -> list[str]:
        assert row.result and row.bytes_per_worker and reference.bytes_per_worker
        values = {}
        for flag, value in row.tuned.items():
            is_at_edge = (row.label, flag) in edges
            values[flag] = f"{value:g} \\*" if is_at_edge else f"{value:g}"
        rate = values.pop("lr")
        hyperparams = [f"{flag.replace('-', ' ')} {x}" for flag, x in values.items()]
        relative_bytes = f"{row.bytes_per_worker / reference.bytes_per_worker:.2g}"
        difference = ""
        if row is not reference and row.comparison.difference:
            numbers = row.comparison.difference[:3]
            difference = "{} [{}, {}]".format(
                *[_format_value(x or 0.0, measure) for x in numbers]
            )
        final = _format_with_deviation(*row.result[:2], measure)
        return [
            relative_bytes,
            final,
            difference,
            rate,
            ", ".join(hyperparams),
            verdict(row, measure),
        ]

    heads = [
        "algorithm",
        "bytes",
        measure.name.removeprefix("test "),
        "difference",
        "rate",
        "its own hyperparameter",
        "verdict",
    ]
    rows = [[f"`{row.label}`", *cells(row)] for row in _sort_rows(report)]
    return _table(heads, rows)


def _format_value(x: float, measure: Measure) -> str:
    decimals = 1 if measure.scale == 100 else 3
    return f"{measure.scale * x:z.{decimals}f}"


def _format_with_deviation(
    mean: float, deviation: float | None, measure: Measure
) -> str:
    return (
        f"{_format_value(mean, measure)} ± {_format_value(deviation or 0.0, measure)}"
    )


def equal_time_table(report: Report, links: Sequence[str] = tuple(LINKS)) -> list[str]:
    """Returns a Markdown table of the measure after an equal time on each link.

    It is that of the last evaluation by then. The time is that of the whole run of
    `CLOCK` on the link.
    """
    curves = {curve.label: curve for curve in report.curves}
    limits = {link: curves[CLOCK].seconds[link][-1] for link in links}
    rows = []
    for row in _sort_rows(report):
        cells = [f"`{row.label}`"]
        for link in links:
            curve = curves[row.label]
            cells.append(_value_at_time(curve, link, limits[link], report.measure))
        rows.append(cells)
    heads = [f"{LINKS[link]}, {limits[link]:.2g} s" for link in links]
    return _table(["algorithm", *heads], rows)


def _value_at_time(curve: Curve, link: str, seconds: float, measure: Measure) -> str:
    """Returns the measure of a curve's last evaluation by a time; "" before any."""
    clock = curve.seconds[link]
    position = int(np.searchsorted(clock, seconds * (1 + 1e-9), "right")) - 1
    if position < 0:
        return ""
    value = _format_value(curve.bands[measure.key].mean[position], measure)
    if position == len(curve.steps) - 1:
        return value
    return f"{value} ({curve.steps[position]:,})"


def _sort_rows(report: Report) -> list[Row]:
    """Returns the rows that have a result, the best first."""

    def loss(row: Row) -> float:
        assert row.result
        return -report.measure.side * row.result[0]

    return sorted([row for row in report.rows if row.result], key=loss)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table; columns of single numbers are at right."""
    alignments = ["--:" if head in ("bytes", "rate") else "---" for head in heads]
    lines = []
    for cells in (heads, alignments, *rows):
        line = f"| {' | '.join(cells)} |"
        lines.append(" ".join(line.split()))
    return lines


def format_csv(table: Sequence[str]) -> str:
    """Returns a Markdown table as text of a CSV file, without backslashes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head, _, *lines = table
    for line in (head, *lines):
        cells = line.replace("\\*", "*").strip("|").split("|")
        writer.writerow([cell.strip() for cell in cells])
    return text.getvalue()
