"""Writes what the docs say of all algorithms: their table, two lists, their number.

python -m pages.table
"""

import csv
import inspect
import io
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

import syncalgos
from pages.docstrings import Docstring, formulas, joined, parsed
from pages.traffic import LEARNING_RATE, needs_rate

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "algorithms.md"
TABLE = ROOT / "docs" / "tables" / "algorithms.csv"
COUNTING_PAGES = (ROOT / "README.md", ROOT / "docs" / "studies.md")
# In the phrases "implements 57 algorithms" and "45 of the 57 algorithms" (were tuned).
COUNT = re.compile(r"(\bimplements\s+|\b45\s+of\s+the\s+)(\d+)(?=\s+algorithms\b)")
HEAD = "name", "update", "sends", "effective rate", "source"
MARKED = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)
CENTER_LIST = re.compile(
    r"(?<=<!-- algorithms without a center of their own -->\n).*?(?=<!-- end -->)",
    re.DOTALL,
)
LAYERED_LIST = re.compile(
    r"(?<=<!-- algorithms with the parameter layered -->\n).*?(?=<!-- end -->)",
    re.DOTALL,
)
RETURNS = re.compile(r"A Strategy\. (?:State: )?(.+?)\. (.+?)\.(?: |$)")
DRIFT = r"[Aa] steady drift (?:moves the center|moves it|goes) (.+?) times as far"
FACTOR = re.compile(DRIFT)
PAPER = re.compile(r'([^";]+), "[^"]+",? [^;]*?(\d{4})')


def write_pages() -> None:
    """Writes the table, the lists of docs/algorithms.md, and the numbers in prose."""
    TABLE.write_text(format_table())
    PAGE.write_text(filled(PAGE.read_text()))
    for page in COUNTING_PAGES:
        page.write_text(fill_count(page.read_text()))


def fill_count(page: str) -> str:
    """Returns the text of a page with the number of algorithms in its phrases."""
    return COUNT.sub(rf"\g<1>{len(syncalgos.ALGORITHMS)}", page)


def filled(page: str) -> str:
    """Returns the text of the page with the lists between their marks."""
    page = CENTER_LIST.sub(format_list(find_without_own_center()), page)
    return LAYERED_LIST.sub(format_list(find_layered()), page)


def find_without_own_center() -> list[str]:
    """Returns the algorithms that sync params and have no center but their mean."""
    names = []
    for name, factory in syncalgos.ALGORITHMS.items():
        parameters = {"learning_rate": LEARNING_RATE} if needs_rate(factory) else {}
        description = syncalgos.describe(factory(**parameters))
        if description.syncs and not description.has_center:
            names.append(name)
    return names


def find_layered() -> list[str]:
    """Returns the algorithms with the parameter `layered`."""
    return [
        name
        for name, factory in syncalgos.ALGORITHMS.items()
        if "layered" in inspect.signature(factory).parameters
    ]


def format_list(names: Iterable[str]) -> str:
    """Returns names in alphabetical order, as a paragraph that ends in a period."""
    *first_names, last_name = [f"`{name}`" for name in sorted(names)]
    sentence = f"{', '.join(first_names)} and {last_name}."
    return textwrap.fill(sentence, width=120) + "\n"


def format_table() -> str:
    """Returns the table of all algorithms as text of a CSV file, in Markdown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD)
    for name, factory in syncalgos.ALGORITHMS.items():
        writer.writerow(row(name, parsed(factory)))
    return text.getvalue()


def row(name: str, doc: Docstring) -> list[str]:
    """Returns the cells of an algorithm."""
    returns = RETURNS.match(doc.returns)
    papers = PAPER.findall(doc.source)
    if not (formulas(doc) and returns and papers):
        raise ValueError(f"{name}: a docstring without formula, state, sends or source")
    sends = returns[2].partition(":")[0]
    factor = FACTOR.search(joined(" ".join(doc.notes)))
    return [
        f"`{name}`",
        "; or: ".join(map(in_a_line, formulas(doc))),
        re.sub(r"^(?:A|Each) (\w+) sends ", r"\1: ", sends),
        factor[1] if factor else "",
        "; ".join(f"{shorten_authors(authors)}, {year}" for authors, year in papers),
    ]


def in_a_line(formula: str) -> str:
    """Joins the lines of a formula, each of which is a step of its own."""
    return "; ".join(map(joined, formula.splitlines()))


def shorten_authors(authors: str) -> str:
    """Returns the first of more than two authors."""
    first_author, *other_authors = authors.strip().split(", ")
    return f"{first_author} et al." if other_authors else first_author


if __name__ == "__main__":
    write_pages()
