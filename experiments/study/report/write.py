"""A report's files: report.html, table.md, table.csv, figures/NAME.svg and .png."""

from pathlib import Path

from experiments.study.analysis.results import Report
from experiments.study.report.page import page
from experiments.study.report.styles import styles
from experiments.study.report.tables import csv, markdown
from experiments.training import files

DPI = 240  # 1200 pixels wide


def write(report: Report, out: Path) -> None:
    """Writes all files, each under a temporary name first: none is ever seen half done.

    Args:
        report: the study.
        out: the folder, which is made if it does not exist.

    Raises:
        OSError: a file cannot be written.
    """
    # matplotlib takes a second to import, which --help must not wait for.
    from experiments.study.report import figures

    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    look = styles({row.label: row.algo for row in report.rows})
    with figures.style():
        plots = figures.plots(report)
        pictures = {x.name: figures.save(x, look, folder, DPI) for x in plots}
    files.write(out / "table.md", markdown(report))
    files.write(out / "table.csv", csv(report))
    files.write(out / "report.html", page(report, plots, pictures))
