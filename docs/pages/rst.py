"""Docstrings as reStructuredText: their formulas are literal blocks."""

import re

SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Yields|Example):$")
CODE = re.compile(r"(`[^`]*`)")


def marked(lines: list[str]) -> list[str]:
    """Returns a docstring in which formulas and signs mean what they show.

    An indented paragraph is a formula, unless it belongs to a section. Stars and bars
    are signs of arithmetic, and an underscore at the end of a word is part of it.
    Napoleon takes what stands before a colon in Returns for a type, so that this
    section becomes a field here.
    """
    out: list[str] = []
    section = ""
    for number, line in enumerate(lines):
        starts = number == 0 or not lines[number - 1].strip()
        heading = SECTION.match(line)
        if heading:
            section = heading[1]
            out.append(":returns:" if section == "Returns" else line)
            continue
        if line and not line.startswith(" "):
            section = ""
        elif line and starts and not section:
            section = "formula"
            out += ["::", ""]
        out.append(line if section in ("formula", "Example") else escaped(line))
    return out


def escaped(line: str) -> str:
    """Escapes what reStructuredText would take for markup, outside of `code`."""
    parts = CODE.split(re.sub(r"(`[^`]*`)(?=\w)", r"\1\\ ", line))  # as in `Part`s
    return "".join(
        part
        if part.startswith("`")
        else re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", part)
        for part in parts
    )
