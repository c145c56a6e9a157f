"""Makes the diffs of docs/from-flax-and-optax.md from the pairs in examples/.

python -m pages.diffs
"""

import ast
import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-flax-and-optax.md"
MARKED = re.compile(r"(<!-- diff (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """Returns the text of the page with the diffs between its marks."""
    return MARKED.sub(lambda x: f"{x[1]}```diff\n{diff(x[2])}```\n{x[3]}", page)


def diff(pair: str) -> str:
    """Returns what differs in two programs, but for their docstrings."""
    before, after = (code(f"{pair}_{side}.py") for side in ("before", "after"))
    # Behind the names of both files and the first @@.
    lines = [*difflib.unified_diff(before, after, n=2)][3:]
    lines = ["@@" if line.startswith("@@") else line.rstrip() for line in lines]
    return "".join(f"{line}\n" for line in lines)


def code(name: str) -> list[str]:
    """Returns the lines of an example behind its docstring."""
    text = (ROOT / "examples" / name).read_text()
    return text.splitlines(keepends=True)[ast.parse(text).body[0].end_lineno :]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
