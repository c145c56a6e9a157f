"""The figures of a report as files and as parts of its page; imports matplotlib."""

import io
import re
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.study.analysis.results import Report
from experiments.study.report.charts import TIPS, Plot, plain
from experiments.study.report.plots import comparisons, curves, flags, profiles
from experiments.study.report.styles import TEMPLATES, VARIABLES, styles
from experiments.training import records

SVG = "http://www.w3.org/2000/svg"
FONT = re.compile(r"font-family: [^;]*;?\s*")
# Numbers far finer than a pixel make up a third of a page's bytes.
LONG = re.compile(r"\d+\.\d{3,}")
# One picture serves light and dark pages: its colours become variables of the page.
COLOUR = re.compile("|".join(VARIABLES))

ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")

# The context in which figures are drawn and written: both read the settings.
style = partial(matplotlib.style.context, TEMPLATES / "figures.mplstyle")


def plots(report: Report) -> list[Plot]:
    """Returns the figures that the report has data for, named like their files."""
    look = styles({row.label: row.algo for row in report.rows})
    found: list[Plot] = []
    for module in (comparisons, curves, profiles, flags):
        for plot in module.plots(report, look):
            slug = re.sub(r"[^a-z0-9]+", "-", plot.name.lower()).strip("-")
            same = [x for x in found if x.name.partition("--")[0] == slug]
            name = f"{slug}--{len(same) + 1}" if same else slug
            found.append(plot._replace(name=name))
    return found


def save(plot: Plot, folder: Path, dpi: int) -> str:
    """Writes a figure as SVG and PNG; returns the SVG to put into a page."""
    figure = plot.draw()
    file, part = pictures(plot, figure)
    records.write(folder / f"{plot.name}.svg", file)
    with io.BytesIO() as png:
        # Takes a third of the usual time and a fifth more bytes.
        figure.savefig(png, format="png", dpi=dpi, pil_kwargs={"compress_level": 1})
        records.write(folder / f"{plot.name}.png", png.getvalue())
    return part


def pictures(plot: Plot, figure: Figure) -> tuple[str, str]:
    """Renders a figure twice.

    Args:
        plot: the texts about it. Its name makes ids unique in a page of many figures.
        figure: the drawing.

    Returns:
        The SVG for a file, with its own colours and fonts on white; and the SVG for a
        page, in the page's font and colours. The latter has no title element, which
        browsers would show wherever the pointer is.
    """
    # At another resolution the layout would leave other room for a legend.
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    root = described(plot, figure)
    file = ElementTree.tostring(root, "unicode") + "\n"
    for key in ("width", "height", "version", "aria-labelledby"):
        del root.attrib[key]
    root.remove(root[0])
    root.set("aria-label", plain(plot.title))
    root.set("aria-describedby", f"{plot.name}-desc")
    x, y, width, height = map(float, root.attrib["viewBox"].split())
    # A page has its own margins: the title begins where the page's text does.
    root.set("viewBox", f"{x + 10:g} {y + 4:g} {width - 10:g} {height - 8:g}")
    for element in root.iter():
        if style := element.get("style"):
            themed = COLOUR.sub(lambda x: VARIABLES[x[0]], FONT.sub("", style))
            element.set("style", themed)
    return file, ElementTree.tostring(root, "unicode")


def described(plot: Plot, figure: Figure) -> ElementTree.Element:
    """Returns the parsed SVG with a title, a description, tooltips and unique ids."""
    # matplotlib hashes ids of shapes with this salt: they are unique in a page.
    settings: Any = {"svg.hashsalt": plot.name}
    # Without a date, the same study gives the same bytes.
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context(settings), io.StringIO() as file:
        figure.savefig(file, format="svg", metadata=metadata)
        root = ElementTree.fromstring(file.getvalue())
    # Inside a page, a stylesheet of the SVG would apply to all of the page.
    for parent in root.findall(f".//{{{SVG}}}style/.."):
        root.remove(parent)
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    root.set("role", "img")
    root.set("aria-labelledby", f"{plot.name}-title {plot.name}-desc")
    for place, (tag, text) in enumerate((("title", plot.title), ("desc", plot.text))):
        element = ElementTree.Element(f"{{{SVG}}}{tag}", id=f"{plot.name}-{tag}")
        element.text = plain(text)
        root.insert(place, element)
    for element in root.iter(f"{{{SVG}}}path"):
        element.set("d", LONG.sub(lambda x: f"{float(x[0]):.2f}", element.get("d", "")))
    move_tips(root, figure)
    # Ids of groups are the same in all figures, and nothing refers to them.
    for group in root.iter(f"{{{SVG}}}g"):
        group.attrib.pop("id", None)
    return root


def move_tips(root: ElementTree.Element, figure: Figure) -> None:
    """Turns invisible markers into circles on top, whose titles are tooltips."""
    lines = figure.findobj(lambda artist: artist.get_gid() == TIPS)
    texts = [str(x.get_label()).split("\n") for x in lines if isinstance(x, Line2D)]
    circles = ElementTree.Element(f"{{{SVG}}}g", {"class": "points", "fill": "none"})
    groups = root.findall(f".//{{{SVG}}}g[@id='{TIPS}']")
    for group, own in zip(groups, texts, strict=True):
        for use, text in zip(group.iter(f"{{{SVG}}}use"), own, strict=True):
            at = {"cx": f"{float(use.attrib['x']):.1f}", "r": "7"}
            at |= {"cy": f"{float(use.attrib['y']):.1f}", "pointer-events": "all"}
            circle = ElementTree.SubElement(circles, f"{{{SVG}}}circle", at)
            ElementTree.SubElement(circle, f"{{{SVG}}}title").text = text
        group.clear()
    root.append(circles)
