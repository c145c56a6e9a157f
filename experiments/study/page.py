"""A report's files: its page, its tables as Markdown and CSV, and its figures.

The page is a single HTML file that needs no script and no other file.
"""

import csv as csv_files
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from experiments import files
from experiments.command.stopping import printable
from experiments.command.terminal import duration, rate
from experiments.command.text_tables import (
    Columns,
    format_text_table,
    tie_units,
    wrap_text,
)
from experiments.study import figures, formats, remarks, sentences
from experiments.study.figures import (
    CSS,
    REPLICA_MEASURES,
    TEMPLATES,
    VARIABLES,
    Plot,
    Styles,
    styles,
)
from experiments.study.results import Report, Row

DPI = 240  # 1200 pixels wide
# Columns that a narrow terminal leaves out, the first ones first.
OPTIONAL = (
    *("seeds", "effective lr", "lr", "diverged"),
    *("corrected p-value", "most a worker sent"),
)
FLAG = re.compile(r"(?<![\w-])--[\w-]+")
MINUS = re.compile(r"(?<=[\s\[])-(?=\d)")
# What is special to TeX.
TEX_COMMANDS = {
    "±": r"$\pm$",
    "\\": r"\textbackslash{}",
    "~": r"\~{}",
    "^": r"\^{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
TEX = str.maketrans({char: f"\\{char}" for char in "&%$#_{}"} | TEX_COMMANDS)
# The columns of a table that others depend on.
P_VALUE = "corrected p-value"


def write_report(report: Report, out: Path) -> None:
    """Writes all files, each under a temporary name first: none is ever seen half done.

    Args:
        report: the study.
        out: the folder, which is made if it does not exist.

    Raises:
        OSError: a file cannot be written.
    """
    folder = out / "figures"
    paper = out / "paper"
    folder.mkdir(parents=True, exist_ok=True)
    paper.mkdir(exist_ok=True)
    look = _styles(report)
    pictures = {}
    differences = None
    with figures.style():
        plots = figures.plots(report)
        for plot in plots:
            pictures[plot.name] = figures.save(plot, look, folder, DPI)
            if plot.name == "differences":
                differences = plot
                figures.save_untitled(plot, look, paper)
    texts = {
        "table.md": render_markdown(report),
        "table.csv": csv(report),
        "paper/table.tex": latex(report, differences),
        "report.html": render_page(report, plots, pictures),
    }
    for name, text in texts.items():
        files.write(out / name, text)


def _styles(report: Report) -> Styles:
    return styles({row.label: row.algo for row in report.rows})


def render_page(
    report: Report, plots: Sequence[Plot], pictures: Mapping[str, str]
) -> str:
    """Renders the report as the text of an HTML file.

    Args:
        report: the study.
        plots: the figures, in order.
        pictures: SVGs by the names of the figures.
    """
    zero_names = [
        measure.name
        for measure in REPLICA_MEASURES
        if measure.key in report.metric_keys and figures.is_empty(report, measure)
    ]
    return template("report.html.j2").render(
        r=report,
        plots=plots,
        pictures=pictures,
        css=Markup(CSS),
        zeros=zero_names,
        styles=_styles(report),
        variables=VARIABLES,
    )


def template(name: str) -> Template:
    """Returns a template of this folder."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        # Labels are text of the user, which must not become tags.
        autoescape=name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name raises an error instead of leaving a gap in the page.
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.globals.update(formats=formats, remarks=remarks, sentences=sentences)
    environment.filters.update(
        prose=prose,
        svg=Markup,
        rate=rate,
        capitalize_first=formats.capitalize_first,
        format_number=formats.format_number,
        tex=tex,
    )
    return environment.get_template(name)


def latex(report: Report, figure: Plot | None) -> str:
    """Returns the table, and the figure of the differences, for LaTeX."""
    rows = []
    for row in report.rows:
        row_cells = cells(report, row, with_times=False)
        if P_VALUE in row_cells:
            # The heading says what it is.
            row_cells[P_VALUE] = row_cells[P_VALUE].removeprefix("p = ")
        rows.append(row_cells)
    return template("table.tex.j2").render(r=report, rows=rows, figure=figure)


def tex(text: str) -> str:
    """Returns text in one line, with what is special to TeX escaped."""
    escaped = " ".join(text.split()).translate(TEX).replace("--", "-{}-")
    return MINUS.sub("$-$", escaped)


def prose(text: str) -> Markup:
    """Returns text without line breaks within flags, or between numbers and units."""
    escaped = str(escape(tie_units(text)))
    return Markup(FLAG.sub(r'<span class="flag">\g<0></span>', escaped))


def cells(report: Report, row: Row, *, with_times: bool) -> dict[str, str]:
    """Returns the texts of a row by column, with or without modelled times."""
    row_cells = {"algorithm": row.label, **_sweep_value(report, row)}
    row_cells[report.measure.name] = formats.format_result(row, report.measure)
    row_cells[sentences.difference_heading(report)] = row.comparison.clause
    if any(table_row.comparison.p is not None for table_row in report.rows):
        row_cells[P_VALUE] = sentences.describe_p(row.comparison)
    row_cells["most a worker sent"] = formats.format_sent_bytes(row)
    if with_times:
        row_cells |= _time_cells(report, row)
    row_cells["lr"] = formats.format_rate(row)
    row_cells["effective lr"] = rate(row.effective_lr)
    # Without times it is for a narrow place, whose sentences give the seeds.
    if with_times or len({table_row.seeds for table_row in report.rows}) > 1:
        row_cells["seeds"] = str(row.seeds)
    if with_times or any(table_row.diverged for table_row in report.rows):
        row_cells["diverged"] = str(row.diverged)
    return row_cells


def _sweep_value(report: Report, row: Row) -> dict[str, str]:
    """Returns the value of the sweep by its flag; {} without a sweep."""
    if not report.sweep:
        return {}
    return {report.sweep: row.point.partition("=")[2]}


def _time_cells(report: Report, row: Row) -> dict[str, str]:
    """Returns modelled times on each network, and what it takes to the target."""
    names = [network.name for network in report.networks]
    time_cells = {}
    for name in names:
        time_cells[f"time, {name}"] = duration(row.seconds.get(name))
    if report.target is not None:
        goal = formats.format_target(report)
        time_cells[f"steps until {goal}"] = formats.format_steps_to_target(row)
        for name in names:
            time = formats.format_time_to_target(row, name)
            time_cells[f"until {goal}, {name}"] = time
    return time_cells


def screen(
    report: Report, out: Path, width: int | None = None, is_written: bool = True
) -> str:
    """Returns the summary that is printed on the screen.

    Args:
        report: the study.
        out: its folder.
        width: of the terminal; None wraps nothing, and keeps all columns.
        is_written: whether the folder has the report's files. If not, no column is
            left out for want of room.
    """
    rows = [cells(report, row, with_times=False) for row in report.rows]
    columns = Columns(
        text=("algorithm", sentences.difference_heading(report)),
        optional=OPTIONAL,
        elsewhere=f"all columns are in {out / 'table.md'}" if is_written else "",
    )
    lines = wrap_text(report.title, width)
    lines += [*format_text_table(rows, columns, width), ""]
    notes = [f"note: {remark}" for remark in report.remarks]
    for text in (*report.headline.split("\n"), *report.sentences, *notes):
        lines += wrap_text(text, width)
    lines.append(f"report: {out / 'report.html'}")
    return "\n".join(line.rstrip() for line in lines)


def render_markdown(report: Report) -> str:
    """Returns the headline, the table and the remarks as Markdown."""
    rows = [cells(report, row, with_times=True) for row in report.rows]
    text_columns = {"algorithm", report.sweep, sentences.difference_heading(report)}
    alignments = ["---" if head in text_columns else "--:" for head in rows[0]]
    lines = []
    for texts in (rows[0], alignments, *(row.values() for row in rows)):
        escaped = [one_line(text).replace("|", "\\|") for text in texts]
        lines.append(f"| {' | '.join(escaped)} |")
    remark_items = [f"- {one_line(remark)}" for remark in report.remarks]
    paragraphs = [
        f"# {one_line(report.title)}",
        one_line(report.headline),
        "\n".join(lines),
        "\n".join(remark_items),
    ]
    return "\n\n".join(text for text in paragraphs if text) + "\n"


def one_line(text: str) -> str:
    """Returns text in one line, in which Markdown sees no HTML tag and no link.

    A label is a user's text: it may hold a link to a script, or marks that turn the
    direction of writing.
    """
    line = printable(" ".join(text.split()))
    return line.replace("<", "&lt;").replace("](", "]\\(")


def csv(report: Report) -> str:
    """Returns a CSV table: a line for each row, with unscaled and unrounded figures.

    An unknown figure is empty. `pandas.read_csv` reads the table directly.
    """
    rows = [csv_row(report, row) for row in report.rows]
    heads: dict[str, None] = {}
    for row in rows:
        heads |= dict.fromkeys(row)
    with io.StringIO(newline="") as file:
        writer = csv_files.DictWriter(file, [*heads], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({head: no_formula(value) for head, value in row.items()})
        return file.getvalue()


def no_formula(value: Any) -> Any:
    """Returns a cell that no spreadsheet takes for a formula: ' before such text."""
    # A label such as =1+1 would be evaluated when the file is opened.
    if not isinstance(value, str) or not value.lstrip().startswith(tuple("=+-@")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def csv_row(report: Report, row: Row) -> dict[str, Any]:
    """Returns the figures of a row by column."""
    key = report.measure.key
    difference = row.comparison.difference
    networks = [network.name for network in report.networks]
    values: dict[str, Any] = {
        "algorithm": row.label,
        **_sweep_value(report, row),
        "seeds": row.seeds,
        "diverged": row.diverged,
        f"{key}_mean": row.result and row.result.mean,
        f"{key}_sd": row.result and row.result.deviation,
        "test_loss_mean": row.loss and row.loss.mean,
        "test_loss_sd": row.loss and row.loss.deviation,
        "difference_mean": difference and difference.mean,
        "difference_low": difference and difference.low,
        "difference_high": difference and difference.high,
        "difference_sd": difference and difference.deviation,
        "difference_pairs": difference and difference.count,
    }
    if report.tuning:
        low, high = row.comparison.with_tuning or (None, None)
        values["with_tuning_low"] = low
        values["with_tuning_high"] = high
    values["verdict"] = row.comparison.clause
    values["p_corrected"] = row.comparison.p
    values["lr"] = row.lr
    values["effective_lr"] = row.effective_lr
    for flag, value in row.tuned.items():
        values[f"tuned_{flag}"] = value
    values["bytes_per_worker"] = row.bytes_per_worker
    values["syncs"] = row.syncs
    values["steps_to_target"] = row.steps_to_target
    for name in networks:
        values[f"seconds: {name}"] = row.seconds.get(name)
    if report.target is not None:
        for name in networks:
            values[f"seconds to target: {name}"] = row.to_target.get(name)
    values["command"] = row.command
    return values
