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
from experiments.command.text_tables import Columns, table, tied, wrapped
from experiments.study import figures, sentences
from experiments.study.figures import CSS, TEMPLATES, VARIABLES, Plot, styles
from experiments.study.results import Report, Row

DPI = 240  # 1200 pixels wide
# Columns that a narrow terminal leaves out, the first ones first.
OPTIONAL = (
    *("seeds", "effective lr", "lr", "diverged"),
    *("corrected p-value", "most a worker sent"),
)
FLAG = re.compile(r"(?<![\w-])--[\w-]+")
# What is special to TeX.
WORDS = {"±": r"$\pm$", "\\": r"\textbackslash{}", "~": r"\~{}", "^": r"\^{}"}
WORDS |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
MINUS = re.compile(r"(?<=[\s\[])-(?=\d)")
TEX = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | WORDS)


def write(report: Report, out: Path) -> None:
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
    look = styles({row.label: row.algo for row in report.rows})
    with figures.style():
        plots = figures.plots(report)
        pictures = {x.name: figures.save(x, look, folder, DPI) for x in plots}
        differences = next((x for x in plots if x.name == "differences"), None)
        if differences:
            figures.save_untitled(differences, look, paper)
    texts = {
        "table.md": markdown(report),
        "table.csv": csv(report),
        "paper/table.tex": latex(report, differences),
        "report.html": page(report, plots, pictures),
    }
    for name, text in texts.items():
        files.write(out / name, text)


def page(report: Report, plots: Sequence[Plot], pictures: Mapping[str, str]) -> str:
    """Renders the report as the text of an HTML file.

    Args:
        report: the study.
        plots: the figures, in order.
        pictures: SVGs by the names of the figures.
    """
    measured = {key for curve in report.curves for key in curve.bands}
    inside = [by for by in figures.REPLICA_MEASURES if by.key in measured]
    return template("report.html.j2").render(
        r=report,
        plots=plots,
        pictures=pictures,
        css=Markup(CSS),
        zeros=[by.name for by in inside if figures.is_empty(report, by)],
        styles=styles({row.label: row.algo for row in report.rows}),
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
    environment.globals["sentences"] = sentences
    own = {"sentence": sentences.sentence, "number": sentences.number, "tex": tex}
    environment.filters.update(prose=prose, svg=Markup, rate=rate, **own)
    return environment.get_template(name)


def latex(report: Report, figure: Plot | None) -> str:
    """Returns the table, and the figure of the differences, for LaTeX."""
    rows = [cells(report, row, times=False) for row in report.rows]
    return template("table.tex.j2").render(r=report, rows=rows, figure=figure)


def tex(text: str) -> str:
    """Returns text in one line, with what is special to TeX escaped."""
    found = " ".join(text.split()).translate(TEX).replace("--", "-{}-")
    return MINUS.sub("$-$", found)


def prose(text: str) -> Markup:
    """Returns text without line breaks within flags, or between numbers and units."""
    escaped = str(escape(tied(text)))
    return Markup(FLAG.sub(r'<span class="flag">\g<0></span>', escaped))


def cells(report: Report, row: Row, times: bool = True) -> dict[str, str]:
    """Returns the texts of a row by column, with or without modelled times."""
    gone = "all diverged" if row.diverged == row.seeds else "undefined"
    measure = sentences.spread(row.measure, report.measure) if row.measure else gone
    swept = {report.sweep: row.point.partition("=")[2]} if report.sweep else {}
    found = {"algorithm": row.label, **swept}
    found[report.measure.name] = measure
    found[sentences.against(report)] = row.comparison.clause
    if any(each.comparison.p is not None for each in report.rows):
        found["corrected p-value"] = row.comparison.p_text
    found["most a worker sent"] = sentences.sent(row)
    links = [network.name for network in report.networks] if times else []
    found |= {f"time, {x}": duration(row.seconds.get(x)) for x in links}
    if report.target is not None and times:
        goal = sentences.target(report)
        found[f"steps until {goal}"] = sentences.until_step(row)
        found |= {f"until {goal}, {x}": sentences.until(row, x) for x in links}
    found |= {"lr": sentences.nominal(row), "effective lr": rate(row.effective_lr)}
    # Without times it is for a narrow place, whose sentences give the seeds.
    if times or len({each.seeds for each in report.rows}) > 1:
        found["seeds"] = str(row.seeds)
    if times or any(each.diverged for each in report.rows):
        found["diverged"] = str(row.diverged)
    return found


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
    rows = [cells(report, row, times=False) for row in report.rows]
    columns = Columns(
        text=("algorithm", sentences.against(report)),
        optional=OPTIONAL,
        elsewhere=f"all columns are in {out / 'table.md'}" if is_written else "",
    )
    lines = wrapped(report.title, width)
    lines += [*table(rows, columns, width), ""]
    notes = [f"note: {remark}" for remark in report.remarks]
    for text in (*report.headline.split("\n"), *report.sentences, *notes):
        lines += wrapped(text, width)
    lines.append(f"report: {out / 'report.html'}")
    return "\n".join(line.rstrip() for line in lines)


def markdown(report: Report) -> str:
    """Returns the headline, the table and the remarks as Markdown."""
    rows = [cells(report, row) for row in report.rows]
    left = {"algorithm", report.sweep, sentences.against(report)}
    aligned = ["---" if head in left else "--:" for head in rows[0]]
    lines = [list(rows[0]), aligned, *(list(row.values()) for row in rows)]
    escaped = [[one_line(text).replace("|", "\\|") for text in line] for line in lines]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in escaped)
    remarks = "\n".join(f"- {one_line(remark)}" for remark in report.remarks)
    parts = [f"# {one_line(report.title)}", one_line(report.headline), grid, remarks]
    return "\n\n".join(part for part in parts if part) + "\n"


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
    heads = list(dict.fromkeys(head for row in rows for head in row))
    with io.StringIO(newline="") as file:
        writer = csv_files.DictWriter(file, heads, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({head: no_formula(x) for head, x in row.items()})
        return file.getvalue()


def no_formula(x: Any) -> Any:
    """Returns a cell that no spreadsheet takes for a formula: ' before such text."""
    # A label such as =1+1 would be evaluated when the file is opened.
    if not isinstance(x, str) or not x.lstrip().startswith(tuple("=+-@")):
        return x
    try:
        float(x)
    except ValueError:
        return f"'{x}"
    return x


def csv_row(report: Report, row: Row) -> dict[str, Any]:
    """Returns the figures of a row by column."""
    swept = {report.sweep: row.point.partition("=")[2]} if report.sweep else {}
    key = report.measure.key
    networks = [network.name for network in report.networks]
    heads = [f"difference_{x}" for x in ("mean", "low", "high", "sd", "pairs")]
    low, high = row.comparison.retuned or (None, None)
    goals = networks if report.target is not None else ()
    return {
        "algorithm": row.label,
        **swept,
        "seeds": row.seeds,
        "diverged": row.diverged,
        f"{key}_mean": row.measure and row.measure.mean,
        f"{key}_sd": row.measure and row.measure.deviation,
        "test_loss_mean": row.loss and row.loss.mean,
        "test_loss_sd": row.loss and row.loss.deviation,
        **dict(zip(heads, row.comparison.difference or (None,) * 5, strict=False)),
        **({"retuned_low": low, "retuned_high": high} if report.tuning else {}),
        "verdict": row.comparison.clause,
        "p_corrected": row.comparison.p,
        "lr": row.lr,
        "effective_lr": row.effective_lr,
        **{f"tuned_{flag}": value for flag, value in row.tuned.items()},
        "bytes_per_worker": row.bytes_per_worker,
        "syncs": row.syncs,
        "steps_to_target": row.steps_to_target,
        **{f"seconds: {name}": row.seconds.get(name) for name in networks},
        **{f"seconds to target: {name}": row.to_target.get(name) for name in goals},
        "command": row.command,
    }
