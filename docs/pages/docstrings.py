"""Docstrings of algorithms, cut into their parts and turned into Markdown."""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import syncalgos
from experiments.command.factories import argument_texts

SECTIONS = ("Args", "Returns", "Raises", "Example")


class Docstring(NamedTuple):
    """The parts of an algorithm's docstring.

    Attributes:
        summary: its first paragraph.
        update: paragraphs up to the parameters; the indented ones are formulas.
        parameters: a description for each name.
        returns: what the strategy holds and sends.
        raises: what is refused.
        notes: paragraphs after the sections.
        example: a session of Python, with what it prints.
        source: the paper.
        family: the heading of its row in the site's list of algorithms.
    """

    summary: str
    update: list[str]
    parameters: dict[str, str]
    returns: str
    raises: str
    notes: list[str]
    example: str
    source: str
    family: str


def parsed(function: Callable) -> Docstring:
    """Cuts the docstring of an algorithm into its parts."""
    docstring = inspect.getdoc(function) or ""
    summary, *paragraphs = re.split(r"\n{2,}", docstring)
    sections: dict[str, str] = {}
    update = []
    notes = []
    source = ""
    family = ""
    for paragraph in paragraphs:
        head, _, text = paragraph.partition(":")
        if head in SECTIONS:
            sections[head] = text.strip("\n")
        elif head == "Source":
            source = joined(text)
        elif head == "Family":
            family = joined(text).removesuffix(".")
        elif sections:
            notes.append(paragraph)
        else:
            update.append(paragraph)
    return Docstring(
        joined(summary),
        update,
        argument_texts(docstring),
        joined(sections.get("Returns", "")),
        joined(sections.get("Raises", "")),
        notes,
        textwrap.dedent(sections.get("Example", "")),
        source,
        family,
    )


def joined(text: str) -> str:
    """Joins the lines of a paragraph."""
    return " ".join(text.split())


def is_formula(paragraph: str) -> bool:
    """Says whether a paragraph of a docstring is indented, as formulas are."""
    return paragraph.startswith("    ")


def formulas(doc: Docstring) -> list[str]:
    """Returns the formulas of an update, in plain text."""
    return [paragraph for paragraph in doc.update if is_formula(paragraph)]


def literal(formula: str) -> str:
    """Turns a formula into a block that shows it as the docstring writes it."""
    return f"```text\n{textwrap.dedent(formula)}\n```"


def to_markdown(prose: str) -> str:
    """Turns plain text into Markdown: public names and pages become links."""
    parts = re.split(r"(`[^`]*`)", joined(prose))
    return "".join(map(linked, parts))


def linked(part: str) -> str:
    """Turns `code`, or the text between, into Markdown."""
    if part.startswith("`"):
        name = part.strip("`")
        return f"{{py:obj}}`~syncalgos.{name}`" if name in dir(syncalgos) else part
    escaped = re.sub(r"([*<$])", r"\\\1", part)
    return re.sub(r"docs/([\w-]+\.md)", r"[](/\1)", escaped)
