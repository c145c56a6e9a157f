"""Papers of references.bib: where each can be read, and its entry."""

import re
import unicodedata
from functools import cache
from pathlib import Path

BIBLIOGRAPHY = Path(__file__).parents[1] / "references.bib"
ENTRY = re.compile(r"^@.*?^\}$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r'(?<=")([^"]{4,250})(?=")')
PLACES = {
    "eprint": "https://arxiv.org/abs/",
    "doi": "https://doi.org/",
    "url": "",
}


@cache
def entries() -> dict[str, str]:
    """Returns the entries by the words of their titles."""
    texts = ENTRY.findall(BIBLIOGRAPHY.read_text("utf-8"))
    return {words(field(entry, "title")): entry for entry in texts}


def words(title: str) -> str:
    """Returns the words of a title in small letters, each between spaces."""
    plain = unicodedata.normalize("NFKD", title.replace("{", "").replace("}", ""))
    letters = "".join(x for x in plain.lower() if not unicodedata.combining(x))
    return " " + " ".join(re.findall(r"\w+", letters)) + " "


def field(entry: str, name: str) -> str:
    """Returns a field of an entry, or nothing."""
    match = re.search(rf"^  {name} = \{{(.*)\}},$", entry, re.MULTILINE)
    return match[1] if match else ""


def titled(title: str) -> str:
    """Returns the entry whose title begins with three words, or a name, or nothing."""
    start = words(title)
    for key, entry in entries().items():
        is_title = start.count(" ") > 3 or f"{{{title}}}:" in entry
        if is_title and key.startswith(start):
            return entry
    return ""


def address(entry: str) -> str:
    """Returns where a paper can be read, or nothing."""
    for name, prefix in PLACES.items():
        value = field(entry, name)
        if value:
            return prefix + value
    return ""


def folded(source: str) -> str:
    """Returns the entries of the papers in a text, folded, in Markdown, or nothing."""
    bibtex = "\n\n".join(filter(None, map(titled, QUOTED.findall(source))))
    if not bibtex:
        return ""
    head = "<details>\n<summary>BibTeX</summary>"
    return f"{head}\n\n```bibtex\n{bibtex}\n```\n\n</details>"
