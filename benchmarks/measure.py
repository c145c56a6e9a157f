"""Timing in turn, ratios within turns, records and tables for all benchmarks.

Machines are noisy, so contestants run in turn, and ratios are taken within a turn.
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_turn(
    runs: Mapping[str, Callable[[], Any]], repeats: int, warmups: int = 1
) -> dict[str, list[float]]:
    """Times each of the runs, one after the other in every turn.

    Args:
        runs: functions to time, by name; each must wait for its results.
        repeats: number of turns that count, at least 1; every other goes backwards.
        warmups: number of turns before them, which compile.

    Returns:
        By name, the seconds of each turn, (repeats,).
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warmups + repeats):
        for name in sorted(runs, reverse=bool(turn % 2)):
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[warmups:] for name, times in seconds.items()}


def summarize_spread(values: Sequence[float], digits: int = 4) -> list[float]:
    """Returns [minimum, median, maximum], to `digits` significant digits."""
    extent = (min(values), statistics.median(values), max(values))
    return [float(f"{value:.{digits}g}") for value in extent]


def rates(seconds: Sequence[float], work: float) -> list[float]:
    """Returns the `spread` of the work done per second, over the turns."""
    return summarize_spread([work / turn_seconds for turn_seconds in seconds])


def ratios(seconds: Sequence[float], other_seconds: Sequence[float]) -> list[float]:
    """Returns the `spread` of how many times as fast as the others, over the turns."""
    return summarize_spread(
        [b / a for a, b in zip(seconds, other_seconds, strict=True)]
    )


def print_record(record: dict[str, Any]) -> dict[str, Any]:
    """Prints a record as a JSON line, and returns it."""
    print(json.dumps(record), flush=True)
    return record


def in_fresh_processes(
    measure: Callable[..., dict[str, Any]], cases: Iterable[Sequence[Any]], jobs: int
) -> list[dict[str, Any]]:
    """Measures and reports each case in a separate process.

    Args:
        measure: function from a case's arguments to a record.
        cases: the arguments of each case.
        jobs: number of processes at a time.
    """
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    )
    with pool:
        return [*map(print_record, pool.map(measure, *zip(*cases, strict=True)))]


def format_rows(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns rows as a Markdown table; spreads are minimum, median, maximum."""

    def format_cell(value: Any) -> str:
        if isinstance(value, list | tuple):
            return ", ".join(f"{x:,.4g}" for x in value)
        return f"{value:,.4g}" if isinstance(value, float) else str(value)

    lines = [head, ["---"] * len(head)]
    for row in rows:
        lines.append([format_cell(value) for value in row])
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def table_of_records(
    columns: Mapping[str, str | Callable[[Mapping[str, Any]], Any]],
    records: Sequence[Mapping[str, Any]],
) -> str:
    """Returns records as a table; a column is a field or a function of a record."""
    rows = []
    for record in records:
        row = []
        for column in columns.values():
            row.append(record[column] if isinstance(column, str) else column(record))
        rows.append(row)
    return format_rows([*columns], rows)
