"""A report's files: report.html, table.md, table.csv, figures/NAME.svg and .png."""

import io
from pathlib import Path

from experiments import records
from experiments.study.html import Shown, page
from experiments.study.results import Report
from experiments.study.tables import csv, markdown

DPI = 180  # 850 pixels wide


def write(report: Report, out: Path) -> None:
    """Writes all files, each under another name first: no reader sees half a file.

    Args:
        report: what is told.
        out: an existing folder, or one to be made.

    Raises:
        OSError: a file cannot be written.
    """
    from experiments.study import figures, svg  # matplotlib takes long to import

    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    shown = {}
    for name, drawing in figures.draw(report).items():
        picture = svg.picture(drawing, name)
        shown[name] = Shown(picture.inline, drawing.note, drawing.group)
        records.write(folder / f"{name}.svg", picture.file)
        with io.BytesIO() as file:
            drawing.figure.savefig(file, format="png", dpi=DPI)
            records.write(folder / f"{name}.png", file.getvalue())
    records.write(out / "table.md", markdown(report))
    records.write(out / "table.csv", csv(report))
    records.write(out / "report.html", page(report, shown))
