"""Makes the table of docs/algorithms.md from the algorithms' docstrings.

python -m pages.table
"""

import re
from pathlib import Path

import syncalgos
from pages.docstrings import Docstring, formulas, joined, parsed

PAGE = Path(__file__).parents[1] / "algorithms.md"
HEAD = "name", "update", "state", "sends", "effective rate", "source"
MARKED = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)
RETURNS = re.compile(r"A Strategy\. (?:State: )?(.+?)\. (.+?)\.(?: |$)")
DRIFT = r"[Aa] steady drift (?:moves the center|moves it|goes) (.+?) times as far"
FACTOR = re.compile(DRIFT)
PAPER = re.compile(r'([^";]+), "[^"]+",? [^;]*?(\d{4})')


def filled(page: str) -> str:
    """Returns the text of the page with the table between its marks."""
    docs = {name: parsed(make) for name, make in syncalgos.ALGORITHMS.items()}
    cells = [HEAD, ["---"] * len(HEAD), *(row(name, docs[name]) for name in docs)]
    lines = [f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in cells]
    return MARKED.sub(lambda _: "".join(lines), page)


def row(name: str, doc: Docstring) -> list[str]:
    """Returns the cells of an algorithm."""
    returns = RETURNS.match(doc.returns)
    papers = PAPER.findall(doc.source)
    if not (formulas(doc) and returns and papers):
        raise ValueError(f"{name}: a docstring without formula, state, sends or source")
    state, sends = returns.groups()
    state = re.sub("^No state", "none", state)
    sends = sends.partition(":")[0]
    factor = FACTOR.search(joined(" ".join(doc.notes)))
    cells = [
        f"`{name}`",
        "; or: ".join(map(in_a_line, formulas(doc))),
        re.sub(", (shaped )?like params|, at least float32", "", state),
        re.sub(r"^(?:A|Each) (\w+) sends ", r"\1: ", sends),
        factor[1] if factor else "",
        "; ".join(f"{first_of(authors)}, {year}" for authors, year in papers),
    ]
    return [cell.replace("|", r"\|") for cell in cells]


def in_a_line(formula: str) -> str:
    """Joins the lines of a formula, each of which is a step of its own."""
    return "; ".join(map(joined, formula.splitlines()))


def first_of(authors: str) -> str:
    """Returns the first of more than two authors."""
    first, *others = authors.strip().split(", ")
    return f"{first} et al." if others else first


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
