"""Text of the site's pages: its signs and spaces, and links to what it names."""

import re
import textwrap
from collections.abc import Callable, Iterator

from docutils import nodes
from sphinx.addnodes import desc_signature, pending_xref

import syncalgos
from pages import papers

CODE = nodes.literal, nodes.FixedTextElement, nodes.math, nodes.raw, desc_signature
LINKS = nodes.reference, pending_xref, nodes.title, nodes.term, desc_signature
# A sign of a number, one between two, a dash, an arrow; spaces at which no line ends.
SIGNS = (
    (re.compile(r"(?<![\w.\u2212-])-(?=\d)"), "\u2212"),
    (re.compile(r"(?<=\b1)\s-\s"), "\u00a0\u2212\u00a0"),
    (re.compile(r"\s-\s"), " \u2212 "),
    (re.compile(r" -- "), " – "),
    (re.compile("->"), "→"),
    (re.compile(r"\s±\s"), "\u00a0±\u00a0"),
    (re.compile(r"(?<=\d)\s(?=(?:[%*]|[kMGT]?B|[kMG]bit/s|ms|s)(?!\w))"), "\u00a0"),
    (re.compile(r"(?<=\d,)\s(?=[+\u2212]?[\d.]+\])"), "\u00a0"),
)
LONGEST_DESCRIPTION = 160
# A table that takes the right column: of so many columns, or of fewer and so many rows.
WIDE_COLUMNS = 6
LONG_COLUMNS = 5
LONG_ROWS = 20
NUMBER = re.compile(r"[+\u2212]?\d[^A-Za-z;]*(?:[A-Za-z]+[^A-Za-z;]*)?")


def finish(app, doctree: nodes.document) -> None:
    """Changes a page that was read."""
    for text in texts(doctree, CODE):
        signed_text = signed(text)
        if signed_text != text:
            text.parent.replace(text, nodes.Text(signed_text))
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) < 28 and NUMBER.fullmatch(cell.astext()):
            cell["classes"].append("number")
    widen_tables(doctree)
    for text in texts(doctree, CODE + LINKS):
        text.parent.replace(text, [*cited(text)])
    page = app.env.docname
    if not page.startswith("reference/"):
        to_algorithms(doctree, page, app.builder.get_relative_uri)


def page_description(doctree: nodes.document) -> str:
    """Returns the first sentences of a page, or its title, for its head."""
    for paragraph in doctree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if not inside(paragraph, (nodes.table, nodes.list_item)) and " " in text:
            return textwrap.shorten(text, LONGEST_DESCRIPTION, placeholder=" …")
    titles = [title.astext() for title in doctree.findall(nodes.title)]
    return titles[0] if titles else ""


def widen_tables(doctree: nodes.document) -> None:
    """Lets tables of many columns take the right column of the page, too."""
    for table in [*doctree.findall(nodes.table)]:
        columns = len([*table.findall(nodes.colspec)])
        rows = len([*table.findall(nodes.row)])
        if columns >= WIDE_COLUMNS or (columns >= LONG_COLUMNS and rows >= LONG_ROWS):
            box = nodes.container(classes=["full-width"])
            if rows >= LONG_ROWS:
                box["classes"].append("long-table")
            table.replace_self(box)
            box += table


def inside(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    """Says whether a node, or one around it, is of these kinds."""
    while node and not isinstance(node, kinds):
        node = node.parent
    return node is not None


def texts(doctree: nodes.document, kinds: tuple[type, ...]) -> list[nodes.Text]:
    """Returns the text of a page outside of these kinds of nodes."""
    return [text for text in doctree.findall(nodes.Text) if not inside(text, kinds)]


def signed(text: str) -> str:
    """Returns a text with its signs and spaces."""
    for pattern, sign in SIGNS:
        text = pattern.sub(sign, text)
    return text


def cited(text: str) -> Iterator[nodes.Node]:
    """Yields a text in which titles of papers are links."""
    for part in papers.QUOTED.split(text):
        where = papers.address(papers.titled(part))
        yield nodes.reference("", part, refuri=where) if where else nodes.Text(part)


def is_cell(text: nodes.Text) -> bool:
    """Says whether a cell of a table holds this text alone."""
    cell = text.parent.parent
    return isinstance(cell, nodes.entry) and cell.astext() == text


def to_algorithms(doctree: nodes.document, page: str, path: Callable) -> None:
    """Makes names of algorithms links, but for that of the page itself."""
    plain = [text for text in doctree.findall(nodes.Text) if is_cell(text)]
    for literal in [*doctree.findall(nodes.literal), *plain]:
        name = literal.astext().partition(" --")[0]
        target = f"_made/algorithms/{name}"
        is_algorithm = name in syncalgos.ALGORITHMS and target != page
        if is_algorithm and not inside(literal, LINKS):
            link = nodes.reference("", "", internal=True, refuri=path(page, target))
            literal.parent.replace(literal, link)
            link += literal
