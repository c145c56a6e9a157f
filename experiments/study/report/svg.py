"""Figures as SVG: files of their own, and pictures that take a page's colours."""

import io
import re
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib

from experiments.study.report.canvas import GRID, INK, MUTED, PAPER, Drawing, plain
from experiments.study.report.styles import COLOURS

SVG = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
FONT = re.compile(r"font-family: [^;]*;?\s*")
LONG = re.compile(r"\d+\.\d{3,}")  # finer than anybody sees
THEME = {
    INK: "currentColor",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PAPER: "none",
    **{colour: f"var(--series-{i})" for i, colour in enumerate(COLOURS)},
}


class Picture(NamedTuple):
    """A figure as SVG.

    Attributes:
        file: white, with its own colours and fonts.
        inline: part of a page, in the page's font and colours: it gives --muted,
            --grid and --series-0 … as CSS variables. Its title is no element, which a
            browser would show wherever it is pointed at.
    """

    file: str
    inline: str


def picture(drawing: Drawing, name: str, kind: str = "") -> Picture:
    """Renders the figure.

    Args:
        drawing: what to render.
        name: makes its ids its own in a page of many.
        kind: its class in the page.
    """
    root = _described(drawing, name)
    file = ElementTree.tostring(root, "unicode") + "\n"
    for key in ("width", "height", "version", "aria-labelledby"):
        del root.attrib[key]
    root.remove(root[0])
    root.attrib.update({"aria-label": plain(drawing.title)})
    root.attrib.update({"aria-describedby": f"{name}-desc"})
    if kind:
        root.set("class", kind)
    x, y, width, height = map(float, root.attrib["viewBox"].split())
    # A page has its own margins: the title begins where the page's text does.
    root.set("viewBox", f"{x + 10:g} {y + 4:g} {width - 10:g} {height - 8:g}")
    for element in root.iter():
        if style := element.get("style"):
            style = FONT.sub("", style)
            for colour, variable in THEME.items():
                style = style.replace(colour, variable)
            element.set("style", style)
    return Picture(file, ElementTree.tostring(root, "unicode"))


def _described(drawing: Drawing, name: str) -> ElementTree.Element:
    """The parsed SVG with a title, a description and ids no other figure has."""
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name}
    with matplotlib.rc_context(settings), io.StringIO() as file:
        drawing.figure.savefig(file, format="svg", metadata={"Date": None})
        root = ElementTree.fromstring(file.getvalue())
    for prefix, uri in (("", SVG), ("xlink", LINK[1:-5])):
        ElementTree.register_namespace(prefix, uri)
    for unused in [x for x in root if x.tag == f"{{{SVG}}}metadata"]:
        root.remove(unused)
    for parent in root.findall(f".//{{{SVG}}}style/.."):
        root.remove(parent)  # rules for every element of the page
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    _rename(root, name)
    root.attrib.update({"role": "img", "aria-labelledby": f"{name}-title {name}-desc"})
    for place, (tag, text) in enumerate(
        (("title", drawing.title), ("desc", drawing.text))
    ):
        element = ElementTree.Element(f"{{{SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = plain(text)
        root.insert(place, element)
    for element in root.iter(f"{{{SVG}}}path"):
        element.set("d", LONG.sub(lambda x: f"{float(x[0]):.2f}", element.get("d", "")))
    root.append(_points(drawing))
    return root


def _points(drawing: Drawing) -> ElementTree.Element:
    """Circles around the points, which cannot be seen: a browser shows their titles."""
    group = ElementTree.Element(f"{{{SVG}}}g", {"class": "points", "fill": "none"})
    for x, y, text in drawing.points:
        at = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "7", "pointer-events": "all"}
        circle = ElementTree.SubElement(group, f"{{{SVG}}}circle", at)
        ElementTree.SubElement(circle, f"{{{SVG}}}title").text = plain(text)
    return group


def _rename(root: ElementTree.Element, name: str) -> None:
    """Puts the figure's name before ids that something refers to; drops others."""
    used = set()
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == LINK:
                used.add(value[1:])
                element.set(key, f"#{name}-{value[1:]}")
            elif found := re.fullmatch(r"url\(#(.+)\)", value):
                used.add(found[1])
                element.set(key, f"url(#{name}-{found[1]})")
    for element in root.iter():
        own = element.attrib.pop("id", None)
        if own in used:
            element.set("id", f"{name}-{own}")
