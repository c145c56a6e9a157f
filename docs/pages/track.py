"""Makes the tables of docs/track.md from the logs of the entries.

python -m pages.track
"""

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.command import terminal
from experiments.study.statistics import LEVEL
from pages import table

PAGE = Path(__file__).parents[1] / "track.md"
ENTRIES = PAGE.with_suffix("")


def filled(page: str) -> str:
    """Returns the text of the page with a table of each size between its marks."""
    logs = [(x, json.loads(x.read_text())) for x in sorted(ENTRIES.rglob("*.json"))]
    # By what was run, not by the folder, which anybody can choose.
    sizes = iter([False, True])
    return table.MARKED.sub(lambda _: entries(logs, next(sizes)), page)


def entries(found: Sequence[tuple[Path, dict[str, Any]]], is_wide: bool) -> str:
    """Returns the table of the entries of a size, by their logs."""
    logs = [each for each in found if ("wide" in each[1]["words"]) is is_wide]
    # What misses the target has no score, however few its bytes are.
    logs.sort(key=lambda each: (misses(each[1]), each[1]["found"]["bytes_per_worker"]))
    links = ", ".join(logs[0][1]["found"]["seconds"])
    head = ["", "entry", "accuracy", "p", "a worker sends", f"seconds: {links}"]
    rows = [row(number, *each) for number, each in enumerate(logs, 1)]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def misses(log: dict[str, Any]) -> bool:
    """Whether the logged seeds do not show a mean above the target."""
    return log["found"]["p"] >= LEVEL


def row(number: int, path: Path, log: dict[str, Any]) -> Sequence[str]:
    """Returns the cells of an entry."""
    found, name = log["found"], path.relative_to(PAGE.parent).with_suffix("")
    what = (ast.get_docstring(ast.parse(log["code"])) or "").partition("\n")[0]
    mean, deviation = 100 * found["test_accuracy"], 100 * found["deviation"]
    p = f"{found['p']:.1g}" if found["p"] >= 1e-4 else "< 0.0001"
    seconds = [f"{float(f'{x:.3g}'):,g}" for x in found["seconds"].values()]
    return (
        "not shown" if misses(log) else str(number),
        f"[{name.name}]({name}.py), [log]({name}.json): {what.rstrip('.')}",
        f"{mean:.1f} ± {deviation:.1f} % ({len(log['runs'])})",
        p,
        terminal.size(found["bytes_per_worker"]),
        "; ".join(seconds),
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
