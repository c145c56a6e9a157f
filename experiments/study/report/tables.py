"""A report's table as Markdown, to be read, and as CSV, to be computed with."""

import csv as files
import io
from typing import Any

from experiments.cli.terminal import rate
from experiments.study.analysis.formatting import (
    COMMAND,
    against,
    duration,
    point_text,
    sent,
    spread,
    target,
    until,
    until_step,
)
from experiments.study.analysis.results import Report, Row
from experiments.study.statistics import Spread


def markdown(report: Report) -> str:
    """The headline, the table, and what a reader must know.

    Args:
        report: what is told.
    """
    measure, swept = report.measure, bool(report.sweep)
    heads = ["algorithm", report.sweep] if swept else ["algorithm"]
    heads += [measure.name, against(report), "each worker sent"]
    heads += [f"time, {n.name}" for n in report.networks]
    if report.target is not None:
        heads += [f"steps until {target(report)}"]
        heads += [f"until {target(report)}, {n.name}" for n in report.networks]
    heads += ["lr", "effective lr", "seeds", "diverged"]
    left = 2 + swept
    aligned = ["---" if i < left - 1 or i == left else "--:" for i in range(len(heads))]
    lines = [heads, aligned, *(markdown_row(report, row) for row in report.rows)]
    table = "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
    remarks = "\n".join(f"- {with_code(remark)}" for remark in report.remarks)
    parts = [f"# {line_of(report.title)}", line_of(report.headline), table, remarks]
    return "\n\n".join(part for part in parts if part) + "\n"


def line_of(text: str) -> str:
    """In one line, as HTML tags are text here."""
    return " ".join(text.split()).replace("<", "&lt;")


def with_code(text: str) -> str:
    """In one line, a command at its end as code."""
    text = " ".join(text.split())
    found = COMMAND.search(text)
    if found is None:
        return line_of(text)
    return f"{line_of(text[: found.start()])} `{found[0]}`"


def cell(text: str) -> str:
    """Text that ends no cell."""
    return line_of(text).replace("|", "\\|")


def markdown_row(report: Report, row: Row) -> list[str]:
    """What a line of the table says."""
    cells = [row.label, point_text(row.point).partition(" ")[2]]
    cells = cells if report.sweep else cells[:1]
    measure = spread(row.measure, report.measure)
    cells += ["all diverged" if row.diverged and not row.measure else measure]
    cells += [row.verdict, sent(row)]
    cells += [duration(row.seconds.get(n.name)) for n in report.networks]
    if report.target is not None:
        cells += [until_step(row)]
        cells += [until(row, n.name) for n in report.networks]
    return [
        *cells,
        rate(row.lr),
        rate(row.effective_lr),
        str(row.seeds),
        str(row.diverged),
    ]


def csv(report: Report) -> str:
    """A line for each row: figures as they were computed, unscaled, one a column.

    What there is not is empty. `pandas.read_csv` reads it as it is; before text that a
    spreadsheet would take for a formula stands a '.

    Args:
        report: what is told.
    """
    with io.StringIO(newline="") as file:
        rows = [csv_row(report, row) for row in report.rows]
        table = [{name: no_formula(x) for name, x in row.items()} for row in rows]
        heads = list(dict.fromkeys(name for line in table for name in line))
        writer = files.DictWriter(file, heads, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        return file.getvalue()


def no_formula(x: Any) -> Any:
    """A cell that a spreadsheet shows as it is; numbers stay numbers."""
    if not isinstance(x, str) or not x.lstrip().startswith(tuple("=+-@")):
        return x
    try:
        float(x)
    except ValueError:
        return f"'{x}"
    return x


def csv_row(report: Report, row: Row) -> dict[str, Any]:
    """The figures of a row by their columns."""
    swept = {report.sweep: row.point.partition("=")[2]} if report.sweep else {}
    difference = row.difference
    names = ("mean", "low", "high", "deviation", "count")
    return {
        "algorithm": row.label,
        **swept,
        "seeds": row.seeds,
        "diverged": row.diverged,
        **spread_columns(report.measure.key, row.measure),
        **spread_columns("test_loss", row.loss),
        **{
            f"difference_{name}": None if difference is None else getattr(difference, x)
            for name, x in zip((*names[:3], "sd", "pairs"), names, strict=True)
        },
        "verdict": row.verdict,
        "lr": row.lr,
        "effective_lr": row.effective_lr,
        **{f"tuned_{flag}": value for flag, value in row.tuned.items()},
        "bytes_per_worker": row.bytes_per_worker,
        "syncs": row.syncs,
        "steps_to_target": row.steps_to_target,
        **{f"seconds: {n.name}": row.seconds.get(n.name) for n in report.networks},
        **{
            f"seconds to target: {n.name}": row.to_target.get(n.name)
            for n in report.networks
        },
        "command": row.command,
    }


def spread_columns(key: str, value: Spread | None) -> dict[str, float | None]:
    """Mean and standard deviation."""
    return {
        f"{key}_mean": None if value is None else value.mean,
        f"{key}_sd": None if value is None else value.deviation,
    }
