"""A report's files: report.html, table.md, table.csv, figures/NAME.svg and .png."""

import io
from pathlib import Path

from experiments.study.analysis.results import Report
from experiments.study.report.page import Shown, page
from experiments.study.report.tables import csv, markdown
from experiments.training import records

DPI = 120  # 1600 pixels wide, or 567


def write(report: Report, out: Path) -> None:
    """Writes all files, each under another name first: no reader sees half a file.

    Args:
        report: what is told.
        out: an existing folder, or one to be made.

    Raises:
        OSError: a file cannot be written.
    """
    from experiments.study.report import figures, svg  # matplotlib takes long to import

    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    shown = {}
    for name, (narrow, wide) in figures.draw(report).items():
        large = svg.picture(wide, name, "wide") if wide else None
        # Nobody points at a phone's figure where another is there for larger screens.
        small = narrow._replace(points=()) if large else narrow
        kind, inner = ("narrow", f"{name}-narrow") if large else ("", name)
        picture = svg.picture(small, inner, kind)
        shown[name] = Shown(large.inline if large else "", picture.inline, narrow)
        records.write(folder / f"{name}.svg", (large or picture).file)
        with io.BytesIO() as file:
            (wide or narrow).figure.savefig(file, format="png", dpi=DPI)
            records.write(folder / f"{name}.png", file.getvalue())
    records.write(out / "table.md", markdown(report))
    records.write(out / "table.csv", csv(report))
    records.write(out / "report.html", page(report, shown))
