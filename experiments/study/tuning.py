"""Chooses the settings of each variant on validation data."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from experiments.study.grid import RunSet
from experiments.study.statistics import LOSS, MIN_SEEDS, Measure, measure

RESAMPLES = 2000


class Tuning(NamedTuple):
    """The scores of one variant over the values of one flag.

    Attributes:
        label: label of the variant.
        point: value of the sweep, as in a row.
        flag: the tuned flag, such as "lr".
        values: the values that were tried.
        scores: for each value, the mean measure on validation data of the best trial
            with this value; None where a run diverged.
        chosen: the best value.
        at_edge: whether the best value is at an end of the range, so that a value
            beyond it may be better.
        low: lower end of a 95 % interval of the best value; None for too few seeds.
        high: upper end of that interval.
        shortfalls: by how much the variant would be worse if other seeds had tuned it.
            For each resample of the tuning seeds, it is the score over all seeds of the
            trial that is best in the resample, minus the score of the chosen trial.
            Empty for too few seeds.
    """

    label: str
    point: str
    flag: str
    values: list[float]
    scores: list[float | None]
    chosen: float
    at_edge: bool
    low: float | None = None
    high: float | None = None
    shortfalls: Sequence[float] = ()


def chosen(made: RunSet, measure_key: str | None) -> RunSet | None:
    """Returns the runs to report, with the best values of their trials.

    Args:
        made: the run set, whose trials have ended.
        measure_key: measure to choose by; None takes the accuracy if there is one.

    Returns:
        The run set; None if it has trials and all of them failed.

    Raises:
        ValueError: the trials lack this measure.
    """
    trials = _tried(trial.read() for trial in made.trials)
    if not trials:
        return None if made.trials else made
    by = measure(measure_key, [s for x in trials for s in x.summaries.values()])
    best = _best(trials, by)
    common = replace(best.common, validation=None)
    return made._replace(values=best.values, common=common)


def _tried(trials: Iterable[RunSet]) -> list[RunSet]:
    """Returns the trials with at least one successful run."""
    return [trial for trial in trials if trial.summaries]


def _best(trials: Sequence[RunSet], by: Measure) -> RunSet:
    """Returns the trial with the best values."""
    return max(trials, key=lambda x: _rank(x, by))


def _rank(trial: RunSet, by: Measure) -> tuple[float, ...]:
    """Returns a rank that is higher for fewer diverged runs, then a better measure."""
    if trial.diverged:
        # If all trials diverge, the one with the fewest diverged runs is chosen.
        return (-trial.diverged,)
    # The loss decides between equal accuracies, which are common on little data.
    return 0, by.side * _graded(_mean(trial, by), by), -_mean(trial, LOSS)


def _graded(scores: Any, by: Measure) -> Any:
    """Returns scores in which accuracies that differ by rounding alone are equal."""
    return np.round(scores, 6) if by.higher_is_better else scores


def _mean(trial: RunSet, by: Measure) -> float:
    values = trial.final(by).values()
    return sum(values) / len(values)


def report(tuned: RunSet, by: Measure) -> list[Tuning]:
    """Returns the scores of a variant, flag by flag."""
    found, trials = [], _tried(tuned.trials)
    if not trials:
        return []
    best, resampled = _best(trials, by), _best_of_resamples(trials, by)
    # The same for all flags, and the same resamples for all variants.
    shortfalls = [_mean(x, by) - _mean(best, by) for x in resampled]
    for flag, value in best.values.items():
        # The score of a value is that of its best trial over all other tuned flags.
        by_value: dict[str, RunSet] = {}
        for trial in sorted(trials, key=lambda x: _rank(x, by)):
            by_value[trial.values[flag]] = trial
        values = sorted(by_value, key=float)
        tops = [by_value[x] for x in values]
        low, high = _ends([float(x.values[flag]) for x in resampled])
        found.append(
            Tuning(
                label=tuned.variant.label,
                point=tuned.point,
                flag=flag.replace("_", "-"),
                values=[float(x) for x in values],
                scores=[None if x.diverged else _mean(x, by) for x in tops],
                chosen=float(value),
                at_edge=len(values) > 1 and value in (values[0], values[-1]),
                # No resample may choose it if other values are almost as good.
                low=None if low is None else min(low, float(value)),
                high=None if high is None else max(high, float(value)),
                shortfalls=shortfalls,
            )
        )
    return found


def _best_of_resamples(trials: Sequence[RunSet], by: Measure) -> list[RunSet]:
    """Returns the best trial of each resample of the seeds; none for too few seeds."""
    fine = [trial for trial in trials if not trial.diverged]
    seeds = sorted(set.intersection(*(set(x.final(by)) for x in fine))) if fine else []
    if len(seeds) < MIN_SEEDS:
        return []
    # Seeds are resampled for all trials together: they saw the same batches.
    scores = by.side * np.array([[x.final(by)[s] for s in seeds] for x in fine])
    losses = np.array([[x.final(LOSS)[s] for s in seeds] for x in fine])
    rng = np.random.default_rng(0)
    picks = rng.integers(len(seeds), size=(RESAMPLES, len(seeds)))
    scores, losses = (x[:, picks].mean(axis=2) for x in (scores, losses))
    scores = _graded(scores, by)
    # As in `_rank`: the loss decides between equal accuracies.
    losses[scores < scores.max(axis=0)] = np.inf
    return [fine[i] for i in losses.argmin(axis=0)]


def _ends(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Returns the ends of the range that holds the middle 95 % of the values."""
    if not values:
        return None, None
    ordered = sorted(values)
    least = len(values) * 25 // 1000
    return ordered[least], ordered[-1 - least]
