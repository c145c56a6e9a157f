"""Runs other projects' implementations on the vectors, and writes what they do.

    python -m conformance.matrix [NAME …] [--environment NAME] [--sources DIR] [--check]

A project takes part if it is importable; the rows of the others stay as they were.
Rows are recorded in matrix.jsonl beside this file. matrix.csv shows them as a table,
and docs/conformance.md their number and the faults; it also says how the environments
are made.
"""

import argparse
import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from conformance.adapters.processes import WorkerError
from conformance.adapters.rows import SOURCES, AgreementRow, Cause, Project
from conformance.check import read

RECORDS = Path(__file__).with_name("matrix.jsonl")
TABLE = Path(__file__).with_name("matrix.csv")
PAGE = Path(__file__).parents[1] / "docs" / "conformance.md"
# The adapters that each file of requirements/ is for.
ENVIRONMENTS = {
    "torch": (
        "demo_authors",
        "dion_authors",
        "exo_gym",
        "fairscale_slowmo",
        "huggingface_accelerate",
        "muloco_authors",
        "pytorch_optimizer_wrappers",
        "timm_lookahead",
        "torch_distributed",
        "torch_optimizer_lookahead",
        "torchft_local_sgd",
    ),
    "jax": ("fedjax_server", "maxtext_diloco", "optax_lookahead"),
    "others": (
        "flower_strategies",
        "fluke_servers",
        "hivemind_averager",
        "nvflare_fedopt",
    ),
}
ADAPTERS = [*chain.from_iterable(ENVIRONMENTS.values())]
BEGIN = "<!-- matrix -->\n"
END = "<!-- end -->"
SHOWN_SYNCS = 3
HEAD = (
    "project",
    "implementation",
    "file",
    "verdict",
    "help or reason",
    "program",
    "difference",
    "equal",
    "within",
)


def load_project(name: str) -> tuple[Project | None, str]:
    """Imports an adapter; returns its project, or None and why it does not run here."""
    try:
        return import_module(f"conformance.adapters.{name}").PROJECT, ""
    except Exception as error:  # what a package raises as it is imported
        return None, f"{type(error).__name__}: {error}"


def find_sync_steps(vectors: Mapping[str, Any]) -> list[int]:
    """Returns the steps after which a file's workers have the same params, or all."""
    steps = vectors["steps"]
    equal = [number for number, row in enumerate(steps) if len(row["params"]) == 1]
    return equal or list(range(len(steps)))


def measure_difference(
    vectors: Mapping[str, Any], path: np.ndarray, tolerance: float
) -> dict[str, Any]:
    """Compares params with those of a file.

    Args:
        vectors: the content of the file.
        path: the workers' params after each step, (steps, workers, size).
        tolerance: the largest difference of an entry that agrees.

    Returns:
        `largest`, the largest difference; and, if it is above the tolerance,
        `first_step` and `first_size`, and the `sizes` after that step's later syncs.
        `equal`: whether the workers have the same params wherever the file's have.
    """
    shape = len(vectors["steps"]), vectors["workers"], len(vectors["start"])
    if path.shape != shape:
        raise ValueError(f"params have the shape {path.shape}, not {shape}")
    expected = np.array(
        [np.broadcast_to(row["params"], shape[1:]) for row in vectors["steps"]]
    )
    sizes = np.abs(path - expected).max((1, 2))  # (steps,)
    spreads = np.ptp(path, axis=1).max(1)  # (steps,)
    has_equal_rows = [len(row["params"]) == 1 for row in vectors["steps"]]
    figures: dict[str, Any] = {"largest": float(sizes.max())}
    wrong_steps = np.flatnonzero(~(sizes <= tolerance))
    if wrong_steps.size:
        first_step = int(wrong_steps[0])
        figures["first_step"] = first_step
        figures["first_size"] = float(sizes[first_step])
        later_syncs = [step for step in find_sync_steps(vectors) if step > first_step]
        figures["sizes"] = [float(sizes[step]) for step in later_syncs]
    if vectors["workers"] > 1 and any(has_equal_rows):
        figures["equal"] = bool(spreads[has_equal_rows].max() <= tolerance)
    return figures


def judge(figures: Mapping[str, Any], help_text: str, cause: Cause | None) -> str:
    """Returns the verdict of a row, from its figures and what its adapter says."""
    error = figures.get("error", "")
    if not error and "first_step" not in figures:
        return "agrees with help" if help_text else "agrees"
    if cause is None or error.partition(":")[0] != cause.error:
        return "undecided"
    return cause.verdict


def run_row(project: Project, row: AgreementRow) -> dict[str, Any]:
    """Runs a row; returns its record."""
    vectors = read(row.file)
    try:
        path = np.asarray(row.run(vectors), float)
        figures = measure_difference(vectors, path, row.tolerance)
    except Exception as error:
        [line, *_] = str(error).strip().splitlines() or [""]
        if not isinstance(error, WorkerError):  # which begins with the kind of its own
            line = f"{type(error).__name__}: {line}"
        figures = {"error": line}
    verdict = judge(figures, row.help, row.cause)
    record = {
        "project": project.name,
        "version": project.version,
        "implementation": row.implementation,
        "file": row.file,
        "tolerance": row.tolerance,
        "verdict": verdict,
        "help": row.help,
    }
    if row.cause and verdict == row.cause.verdict:
        record["reason"] = row.cause.reason
        record["reproduction"] = row.cause.reproduction
    return record | figures


def read_records() -> list[dict[str, Any]]:
    """Returns the last record of each row."""
    if not RECORDS.exists():
        return []
    return [json.loads(line) for line in RECORDS.read_text("utf-8").splitlines()]


def replace_records(
    records: Sequence[dict[str, Any]], name: str, new_records: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the records with those of one project replaced, sorted by project."""
    kept_records = [record for record in records if record["project"] != name]
    return sorted(
        [*kept_records, *new_records], key=lambda record: record["project"].lower()
    )


def format_difference(record: Mapping[str, Any]) -> str:
    """Returns the cell of a difference: its first step and size, and later ones."""
    if "error" in record:
        return record["error"]
    if "first_step" not in record:
        return f"{record['largest']:.0e}"
    text = f"step {record['first_step']}: {record['first_size']:.2g}"
    if record["sizes"]:
        sizes = [f"{size:.2g}" for size in record["sizes"][:SHOWN_SYNCS]]
        text += f"; then {', '.join(sizes)}"
    return text


def format_equal(record: Mapping[str, Any]) -> str:
    """Returns the cell that says whether workers are equal after a sync."""
    if "equal" not in record:
        return ""
    return "yes" if record["equal"] else "no"


def format_cells(record: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a record, in the order of HEAD."""
    explanation = record.get("reason", "")
    if record["verdict"] == "agrees with help":
        explanation = record["help"]
    return [
        f"{record['project']} {record['version']}",
        record["implementation"],
        record["file"],
        record["verdict"],
        explanation,
        record.get("reproduction", ""),
        format_difference(record),
        format_equal(record),
        f"{record['tolerance']:.0e}".replace("e-0", "e-"),
    ]


def format_table(records: Iterable[Mapping[str, Any]]) -> str:
    """Returns the table of all rows as text of a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD)
    writer.writerows(map(format_cells, records))
    return text.getvalue()


def count_verdicts(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the sentence that counts rows, projects and verdicts."""
    counts: dict[str, int] = {}
    for record in records:
        counts[record["verdict"]] = counts.get(record["verdict"], 0) + 1
    projects = {record["project"] for record in records}
    parts = [f"{counts[verdict]} {verdict}" for verdict in sorted(counts)]
    return f"{len(records)} rows of {len(projects)} projects: {', '.join(parts)}."


def format_faults(records: Iterable[Mapping[str, Any]]) -> str:
    """Returns the table of the faults, each once, in the first words of its reason."""
    names_by_fault: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        if record["verdict"] == "fault":
            [headline, *_] = re.split("[:;]", record["reason"], maxsplit=1)
            project = f"{record['project']} {record['version']}"
            fault = project, headline, record["reproduction"]
            names = names_by_fault.setdefault(fault, [])
            [name, *_] = re.split(r"[(,]", record["implementation"], maxsplit=1)
            if name not in names:
                names.append(name)
    lines = ["| project | fault | program |", "|---|---|---|"]
    for (project, headline, program), names in names_by_fault.items():
        implementations = ", ".join(f"`{name}`" for name in names)
        lines.append(
            f"| {project}: {implementations} | {headline} "
            f"| [{program}](../conformance/repros/{program}) |"
        )
    return "\n".join(lines)


def fill_page(page: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of docs/conformance.md with the counts and the faults."""
    introduction, _, section = page.partition(BEGIN)
    _, _, next_sections = section.partition(END)
    summary = f"{count_verdicts(records)}\n\n{format_faults(records)}\n"
    return f"{introduction}{BEGIN}{summary}{END}{next_sections}"


def find_changes(
    records: Iterable[Mapping[str, Any]], new_records: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Returns a line for each row whose verdict is another than its record's."""
    old_verdicts = {
        (record["project"], record["implementation"], record["file"]): record["verdict"]
        for record in records
    }
    lines = []
    for record in new_records:
        key = record["project"], record["implementation"], record["file"]
        old = old_verdicts.get(key, "not recorded")
        if record["verdict"] != old:
            lines.append(f"{' | '.join(key)}: {record['verdict']}, before: {old}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="adapters; all if none"
    )
    parser.add_argument(
        "--environment", choices=ENVIRONMENTS, help="the adapters of one environment"
    )
    parser.add_argument("--sources", help="folder of checkouts that are on no index")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; end with 1 if a verdict is another than the recorded one, "
        "or a project that was asked for by name or environment does not run",
    )
    options = parser.parse_args(arguments)
    if options.sources:
        os.environ[SOURCES] = str(Path(options.sources).absolute())
    unknown = sorted(set(options.names) - set(ADAPTERS))
    if unknown:
        choices = ", ".join(ADAPTERS)
        parser.error(f"no adapter {', '.join(unknown)}: choose from {choices}")
    names = [*options.names, *ENVIRONMENTS.get(options.environment, ())]
    changes = []
    absent = []
    for name in names or ADAPTERS:
        project, reason = load_project(name)
        if project is None:
            print(f"{name}: not run here: {reason}", flush=True)
            absent.append(name)
            continue
        new_records = []
        for row in project.rows:
            record = run_row(project, row)
            new_records.append(record)
            print(
                f"{project.name} {project.version} | {row.implementation} | {row.file} "
                f"| {record['verdict']} | {format_difference(record)}",
                flush=True,
            )
        records = read_records()
        changes += find_changes(records, new_records)
        if not options.check:
            write_matrix(replace_records(records, project.name, new_records))
    for line in changes:
        print(f"changed: {line}", flush=True)
    is_incomplete = bool(names) and bool(absent)
    return int(options.check and (bool(changes) or is_incomplete))


def write_matrix(records: Sequence[dict[str, Any]]) -> None:
    """Writes the records, and from them the table and what the page says."""
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    RECORDS.write_text("\n".join(lines) + "\n", "utf-8")
    TABLE.write_text(format_table(records), "utf-8")
    PAGE.write_text(fill_page(PAGE.read_text("utf-8"), records), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
