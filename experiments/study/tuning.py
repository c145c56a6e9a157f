"""Choosing each algorithm's settings on validation data."""

from pathlib import Path
from typing import Any

from experiments.study.analysis.results import Measure, Tuning, is_fine
from experiments.study.grid import Point, below, tuning_cells
from experiments.study.spec import Spec

Trials = list[tuple[dict[str, str], list[dict[str, Any]]]]  # values, runs' summaries


def trials(spec: Spec, point: Point, out: Path) -> Trials:
    """What was tried for an algorithm, and what the runs' summaries say."""
    cells = tuning_cells(spec, point)
    return [(values, below(cell, out).summaries()) for values, cell in cells]


def chosen(tried: Trials, measure: Measure) -> dict[str, str]:
    """The best values; {} where nothing was tried."""
    if not tried:
        return {}
    return max(tried, key=lambda trial: _rank(trial[1], measure))[0]


def _rank(summaries: list[dict[str, Any]], measure: Measure) -> tuple[float, ...]:
    """Higher is better: none diverged, then the measure, then the loss."""
    diverged = sum(not is_fine(s) for s in summaries)
    if diverged:
        return (-diverged,)
    sign = 1 if measure.higher_is_better else -1
    return 0, sign * _mean(summaries, measure.key), -_mean(summaries, "test_loss")


def _mean(summaries: list[dict[str, Any]], key: str) -> float:
    return sum(s[key] for s in summaries) / len(summaries)


def report(spec: Spec, point: Point, tried: Trials, measure: Measure) -> list[Tuning]:
    """What was tried for an algorithm, flag by flag.

    The score of a value is that of the best trial that has it.
    """
    best, found = chosen(tried, measure), []
    ranges, _ = spec.trials(point.entry)
    for each in ranges:
        values = sorted(each.values, key=float)
        scores = []
        for value in values:
            having = [t for t in tried if t[0][each.flag] == value]
            summaries = max((t[1] for t in having), key=lambda s: _rank(s, measure))
            fine = all(map(is_fine, summaries))
            scores.append(_mean(summaries, measure.key) if fine else None)
        value = best[each.flag]
        found.append(
            Tuning(
                label=point.entry.label,
                point=point.name,
                flag=each.flag.replace("_", "-"),
                values=[float(value) for value in values],
                scores=scores,
                chosen=float(value),
                at_edge=len(values) > 1 and value in (values[0], values[-1]),
            )
        )
    return found
