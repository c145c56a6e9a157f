"""Shows in docs/from-flax-and-optax.md what differs in the pairs of examples/."""

import ast
import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-flax-and-optax.md"
MARK = re.compile(r"^<!-- diff (\w+) -->$", re.MULTILINE)


def filled(page: str) -> str:
    """Returns the text of the page with the diffs in place of its marks."""
    return MARK.sub(lambda mark: f"```diff\n{diff(mark[1])}```", page)


def diff(pair: str) -> str:
    """Returns what differs in two programs, but for their docstrings."""
    before_lines, after_lines = (
        code(f"{pair}_{side}.py") for side in ("before", "after")
    )
    # Behind the names of both files and the first @@.
    lines = [*difflib.unified_diff(before_lines, after_lines, n=2)][3:]
    lines = ["@@" if line.startswith("@@") else line.rstrip() for line in lines]
    return "".join(f"{line}\n" for line in lines)


def code(name: str) -> list[str]:
    """Returns the lines of an example behind its docstring."""
    text = (ROOT / "examples" / name).read_text()
    return text.splitlines(keepends=True)[ast.parse(text).body[0].end_lineno :]
