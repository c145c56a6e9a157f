"""The figures of a report, drawn with matplotlib: only import this to draw them."""

import re
from typing import NamedTuple

import matplotlib

from experiments.study.analysis.results import Report
from experiments.study.report import comparisons, progressions, trials
from experiments.study.report.canvas import NARROW, STYLE, WIDE, Drawing
from experiments.study.report.styles import looks


class Drawn(NamedTuple):
    """One figure in the sizes in which it is shown.

    Attributes:
        narrow: for a phone, or beside others.
        wide: for a page; None where it is shown narrow everywhere.
    """

    narrow: Drawing
    wide: Drawing | None


def draw(report: Report) -> dict[str, Drawn]:
    """Draws every figure that the report has something to see for.

    Returns:
        By names fit for files, in the order in which they are shown.
    """
    names: dict[str, Drawn] = {}
    with matplotlib.rc_context(STYLE):
        look = looks({row.label: row.algo for row in report.rows})
        plans = [
            *comparisons.plans(report, look),
            *progressions.plans(report, look),
            *trials.plans(report, look),
        ]
        for plan in plans:
            narrow = plan.draw(NARROW)
            if narrow is None:
                continue
            slug = re.sub(r"[^a-z0-9]+", "-", plan.name.lower()).strip("-")
            taken = sum(x == slug or x.startswith(f"{slug}--") for x in names)
            name = f"{slug}--{taken + 1}" if taken else slug
            names[name] = Drawn(narrow, plan.draw(WIDE) if plan.large else None)
    return names
