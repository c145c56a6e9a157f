"""Chooses the settings of each variant on validation data."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.study.grid import RunSet
from experiments.study.statistics import LOSS, Measure


class Tuning(NamedTuple):
    """The scores of one variant over the values of one flag.

    Attributes:
        label: label of the variant.
        point: value of the sweep, as in a row.
        flag: such as "lr".
        values: the values that were tried.
        scores: means of the measure on validation data, by value, of the best trial
            with this value; None where a run diverged.
        chosen: the best value.
        at_edge: whether it is at an end of the range, so that better may lie beyond.
    """

    label: str
    point: str
    flag: str
    values: list[float]
    scores: list[float | None]
    chosen: float
    at_edge: bool


def chosen(trials: Sequence[RunSet], measure: Measure) -> Mapping[str, str]:
    """Returns the best values by flag; none without trials."""
    if not trials:
        return {}
    return max(trials, key=lambda trial: _rank(trial, measure)).values


def _rank(trial: RunSet, measure: Measure) -> tuple[float, ...]:
    """Returns a rank that is higher for fewer diverged runs, then a better measure."""
    if trial.diverged:
        # Where all trials diverge, the fewest diverged runs are chosen.
        return (-trial.diverged,)
    # The loss decides between equal accuracies, which are few on little data.
    return 0, measure.side * _mean(trial, measure), -_mean(trial, LOSS)


def _mean(trial: RunSet, measure: Measure) -> float:
    values = trial.final(measure).values()
    return sum(values) / len(values)


def report(tuned: RunSet, measure: Measure) -> list[Tuning]:
    """Returns the scores of a variant, flag by flag."""
    best, found = chosen(tuned.trials, measure), []
    for flag, value in best.items():
        # A value's score is that of its best trial, over all other tuned flags.
        by_value: dict[str, RunSet] = {}
        for trial in sorted(tuned.trials, key=lambda x: _rank(x, measure)):
            by_value[trial.values[flag]] = trial
        values = sorted(by_value, key=float)
        tops = [by_value[x] for x in values]
        found.append(
            Tuning(
                label=tuned.variant.label,
                point=tuned.point,
                flag=flag.replace("_", "-"),
                values=[float(x) for x in values],
                scores=[None if x.diverged else _mean(x, measure) for x in tops],
                chosen=float(value),
                at_edge=len(values) > 1 and value in (values[0], values[-1]),
            )
        )
    return found
