"""Tables of the atlas's page: every algorithm at its best, and after an equal time.

`benchmarks.harness.studies` makes them from the records of the atlas's studies, and
writes them between the marks of docs/studies/atlas.md.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.study.results import Curve, Report, Row
from experiments.study.sentences import kind_of
from experiments.study.statistics import Measure

FIRST = "sync_sgd"  # other algorithms' bytes are relative to its bytes
CLOCK = "model_averaging"  # all have the time of its whole run
LINKS = {"10gbe": "10 GbE", "two-data-centres": "two data centres", "dsl": "DSL"}
KINDS = {"worse": "a loss", "better": "a gain", "few": ""}
# "No loss" means that the 95 % interval lies above this difference.
MARGINS = {"test_accuracy": -0.005, "test_loss": -0.02}


def verdict(row: Row, by: Measure) -> str:
    """Returns "no loss", "a loss", "a gain" or "not resolved", as the preset says."""
    found, kind = row.comparison.difference, kind_of(row.comparison.difference, by)
    if found is None or kind in KINDS:
        return KINDS.get(kind, "")
    low = min(by.side * (x or 0.0) for x in (found.low, found.high))
    return "no loss" if low > MARGINS[by.key] else "not resolved"


def read(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """Returns the lines of a study's table by algorithm."""
    with (folder / "table.csv").open(newline="") as file:
        return {line["algorithm"]: line for line in csv.DictReader(file)}


def best(report: Report) -> list[str]:
    """Returns a Markdown table of all rows, the best first.

    Figures are in % and points, or in nats as they are. A star marks a value at an end
    of those that were tried.
    """
    by, first = report.measure, next(x for x in report.rows if x.label == FIRST)
    edges = {(x.label, x.flag) for x in report.tuning if x.at_edge}

    def cells(row: Row) -> list[str]:
        assert row.measure and row.bytes_per_worker and first.bytes_per_worker
        values = {}
        for flag, value in row.tuned.items():
            is_at_edge = (row.label, flag) in edges
            values[flag] = f"{value:g} \\*" if is_at_edge else f"{value:g}"
        rate = values.pop("lr")
        own = [f"{flag.replace('-', ' ')} {x}" for flag, x in values.items()]
        sent = f"{row.bytes_per_worker / first.bytes_per_worker:.2g}"
        known = () if row is first else row.comparison.difference or ()
        shown = [_shown(x or 0.0, by) for x in known[:3]]
        difference = "{} [{}, {}]".format(*shown) if shown else ""
        end = _with_deviation(*row.measure[:2], by)
        return [sent, end, difference, rate, ", ".join(own), verdict(row, by)]

    heads = "algorithm", "bytes", by.name.removeprefix("test "), "difference"
    rows = [[f"`{row.label}`", *cells(row)] for row in _in_order(report)]
    return _table([*heads, "rate", "its own hyperparameter", "verdict"], rows)


def _shown(x: float, by: Measure) -> str:
    return f"{by.scale * x:z.{1 if by.scale == 100 else 3}f}"


def _with_deviation(mean: float, deviation: float | None, by: Measure) -> str:
    return f"{_shown(mean, by)} ± {_shown(deviation or 0.0, by)}"


def after(report: Report, links: Sequence[str] = tuple(LINKS)) -> list[str]:
    """Returns a Markdown table of the measure after an equal time on each link.

    It is that of the last evaluation by then. The time is that of the whole run of
    `CLOCK` on the link.
    """
    curves = {x.label: x for x in report.curves}
    most = {link: curves[CLOCK].seconds[link][-1] for link in links}
    rows = []
    for row in _in_order(report):
        ends = [_by(curves[row.label], x, most[x], report.measure) for x in links]
        rows.append([f"`{row.label}`", *ends])
    return _table(["algorithm", *[f"{LINKS[x]}, {most[x]:.2g} s" for x in links]], rows)


def _by(curve: Curve, link: str, seconds: float, by: Measure) -> str:
    """Returns the measure of a curve's last evaluation by a time; "" before any."""
    at = int(np.searchsorted(curve.seconds[link], seconds * (1 + 1e-9), "right")) - 1
    if at < 0:
        return ""
    shown = _shown(curve.bands[by.key].mean[at], by)
    return shown if at == len(curve.steps) - 1 else f"{shown} ({curve.steps[at]:,})"


def _in_order(report: Report) -> list[Row]:
    """Returns the rows that have a result, the best first."""
    kept = [(-report.measure.side * x.measure[0], x) for x in report.rows if x.measure]
    return [row for _, row in sorted(kept, key=lambda pair: pair[0])]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table; columns of single numbers are at right."""
    under = ["--:" if head in ("bytes", "rate") else "---" for head in heads]
    return [" ".join(f"| {' | '.join(x)} |".split()) for x in (heads, under, *rows)]


def written(page: Path, mark: str, table: Sequence[str]) -> bool:
    """Writes a table between "<!-- MARK -->" and "<!-- end -->" of a page, if there."""
    head, found, rest = page.read_text("utf-8").partition(f"<!-- {mark} -->\n\n")
    if found:
        tail = rest[rest.index("\n\n<!-- end -->") :]
        page.write_text(head + found + "\n".join(table) + tail, "utf-8")
    return bool(found)
