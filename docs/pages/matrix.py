"""The page of all rows of the matrix: other projects on the vectors."""

from collections.abc import Mapping
from typing import Any

from conformance import matrix

TEXT = """# Other projects on the vectors

{counts} [Vectors for conformance](../docs/conformance.md) says what the
verdicts mean, and how to run them again.

## All rows

"Difference" is the largest one; or the step after which the params first differ, its
size, and the sizes after up to three later syncs. "Equal" says whether the workers'
params are equal wherever those of the file are.

{table}
"""


def page() -> str:
    """Returns the text of the page, with links from the folder of the vectors."""
    records = matrix.read_records()
    lines = [
        "| project | implementation | file | verdict | difference | equal | within |",
        "|---|---|---|---|---|---|---|",
        *map(row, records),
    ]
    return TEXT.format(counts=matrix.count_verdicts(records), table="\n".join(lines))


def row(record: Mapping[str, Any]) -> str:
    """Returns the line of a record in Markdown."""
    cells = matrix.format_cells(record)
    project, implementation, file, verdict, explanation, program, *figures = cells
    verdict_text = f"**{verdict}**"
    if explanation:
        verdict_text += f": {explanation}"
    if program:
        verdict_text += f" ([{program}](repros/{program}))"
    parts = [project, f"`{implementation}`", f"`{file}`", verdict_text, *figures]
    return f"| {' | '.join(part.replace('|', '&#124;') for part in parts)} |"
