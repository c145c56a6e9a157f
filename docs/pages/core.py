"""Includes the library's code in docs/core.md, without docstrings and comments.

A line `<!-- FILE: NAME NAME -->` above a link to the file says which functions the site
shows there; those inside a function or a class as OUTER.INNER. `first 9 lines of NAME`
shows the beginning of a function.
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "core.md"
MARK = re.compile(
    r"<!-- (?P<file>\S+\.py): (?:first (?P<count>\d+) lines of )?"
    r"(?P<names>[\w. ]+) -->\n"
    r"(?P<link>.*\n)"
)


def filled(page: str) -> str:
    """Returns the text of the page with a block of code below each marked link."""
    return MARK.sub(lambda mark: f"{mark['link']}\n{block(mark)}", page)


def block(mark: re.Match[str]) -> str:
    """Returns the block of code that a mark asks for."""
    source = (ROOT / mark["file"]).read_text("utf-8")
    code = "\n\n\n".join(find_code(source, name) for name in mark["names"].split())
    if mark["count"]:
        code = "\n".join(code.splitlines()[: int(mark["count"])])
    return f"```python\n{code}\n```\n"


def find_code(source: str, name: str) -> str:
    """Returns a function as the source has it.

    Raises:
        LookupError: the source has no such function.
    """
    nodes = ast.parse(source).body
    function = None
    for part in name.split("."):
        definitions = [
            node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]
        matches = [node for node in definitions if node.name == part]
        if not matches:
            raise LookupError(f"docs/core.md: no {name} in its file: change its mark")
        function = matches[0]
        nodes = function.body
    assert isinstance(function, ast.FunctionDef)
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    lines = source.splitlines()
    head = lines[function.lineno - 1 : function.body[0].lineno - 1]
    code = [*head, *lines[body[0].lineno - 1 : body[-1].end_lineno]]
    kept_lines = [line for line in code if not line.lstrip().startswith("#")]
    return textwrap.dedent("\n".join(kept_lines)).strip()
