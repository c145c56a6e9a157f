"""Tables of the atlas's page: every algorithm at its best, and after an equal time.

`benchmarks.harness.studies` makes them from the records of the atlas's studies, and
writes them beside these: verdicts.csv and equal-time.csv, which the page includes.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.study.results import Curve, Report, Row
from experiments.study.statistics import LEVEL, Measure, correct_by_holm
from experiments.study.tuning_noise import probability_below

REFERENCE = "sync_sgd"  # other algorithms' bytes are relative to its bytes
CLOCK = "model_averaging"  # all have the time of its whole run
LINKS = {"10gbe": "10 GbE", "two-data-centres": "two data centres", "dsl": "DSL"}
# "No loss" means that a loss of this size is excluded.
MARGINS = {"test_accuracy": -0.005, "test_loss": -0.02}


class _PValues(NamedTuple):
    """The two-sided p-values of a row, whose intervals include the chance of tuning.

    Attributes:
        zero: of no difference.
        margin: of a loss as large as the margin.
        is_better: whether the difference is a gain.
    """

    zero: float
    margin: float
    is_better: bool


def find_verdicts(report: Report) -> dict[str, str]:
    """Returns "no loss", "a loss", "a gain" or "not resolved" by label.

    Both hypotheses, of no difference and of a loss as large as the margin, are tested
    on all rows with Holm's correction, by differences that include the chance of
    tuning. "No loss": a loss of the margin or more is excluded, and no gain is seen. "A
    loss": the difference is below 0, and such a loss is not excluded. A row with a lost
    run has no such verdict as "no loss": the run counts as the worst.
    """
    baseline = next(row for row in report.rows if row.label == REFERENCE)
    verdicts = {row.label: "" for row in report.rows}
    p_by_label: dict[str, _PValues] = {}
    for row in report.rows:
        p_values = _find_p_values(row, baseline, report.measure)
        if row is not baseline and p_values is not None:
            p_by_label[row.label] = p_values
    zero = correct_by_holm({label: p.zero for label, p in p_by_label.items()})
    margin = correct_by_holm({label: p.margin for label, p in p_by_label.items()})
    lost_labels = {row.label for row in report.rows if row.diverged}
    for label, p_values in p_by_label.items():
        excludes_loss = margin[label] < LEVEL and label not in lost_labels
        if zero[label] < LEVEL and p_values.is_better:
            verdicts[label] = "a gain"
        elif excludes_loss:
            verdicts[label] = "no loss"
        elif zero[label] < LEVEL:
            verdicts[label] = "a loss"
        else:
            verdicts[label] = "not resolved"
    return verdicts


def _find_p_values(row: Row, baseline: Row, measure: Measure) -> _PValues | None:
    """Returns the p-values of a row's difference; None without an interval."""
    difference = row.comparison.difference
    if difference is None or difference.low is None:
        return None
    shifts = np.zeros(1)
    if len(row.tuning_shifts) and len(baseline.tuning_shifts):
        shifts = np.subtract(row.tuning_shifts, baseline.tuning_shifts)
    below_zero = probability_below(difference, shifts, 0.0)
    margin = measure.side * MARGINS[measure.key]
    below_margin = probability_below(difference, shifts, margin)
    # Of a loss as a measure, what is worse lies above.
    worse_than_margin = below_margin if measure.side > 0 else 1 - below_margin
    return _PValues(
        zero=2 * min(below_zero, 1 - below_zero),
        margin=min(1.0, 2 * worse_than_margin),
        is_better=measure.side * difference.mean > 0,
    )


def read_table(folder: Path) -> Mapping[str, Mapping[str, str]]:
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
    verdicts = find_verdicts(report)

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
        row_verdict = verdicts[row.label]
        if row.diverged:
            finished_seeds = row.seeds - row.diverged
            row_verdict = f"{row_verdict}, {finished_seeds} of {row.seeds} seeds"
        with_tuning = ""
        if row.comparison.with_tuning:
            with_tuning = "[{}, {}]".format(
                *[_format_value(x, measure) for x in row.comparison.with_tuning]
            )
        return [
            relative_bytes,
            final,
            difference,
            rate,
            ", ".join(hyperparams),
            with_tuning,
            row_verdict,
        ]

    heads = [
        "algorithm",
        "bytes",
        measure.name.removeprefix("test "),
        "difference",
        "rate",
        "its own hyperparameter",
        "with tuning",
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
