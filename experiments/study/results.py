"""The records of a report: every field is a number or a sentence to show."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from experiments.study.runs import Tuning
from experiments.study.statistics import (
    LEVEL,
    MIN_SEEDS,
    ROUNDING,
    Band,
    Difference,
    Measure,
    Spread,
)
from experiments.study.tuning_noise import TuningInterval
from experiments.study.variants import variant_name
from syncalgos.network import Network

# The terms of a comparison whose learning rates were not tuned.
ONE_NOMINAL = "at one nominal rate"
BY_HAND = "at rates given by hand"
BY_DEFAULT = "at the default rates"


class Curve(NamedTuple):
    """One variant at one value of the sweep, over its run.

    Attributes:
        label: label of the variant.
        point: value of the sweep, such as "workers=4"; "" without a sweep.
        steps: local steps of the evaluations.
        bands: bands of the measured metrics, by key: train_loss, test_loss,
            test_accuracy, divergence, drift, pseudo_gradient, displacement_cosine, …
        bytes_per_worker: bytes sent until each evaluation; None if not counted.
        seconds: modelled seconds until each evaluation, by the network's name; empty if
            bytes were not counted. A report has those of named networks only.
    """

    label: str
    point: str
    steps: list[int]
    bands: dict[str, Band]
    bytes_per_worker: list[float] | None
    seconds: dict[str, list[float]]


class Standing(StrEnum):
    """How a row compares with the best one, in the order of an answer."""

    BETTER = "better"  # on the seeds that both have
    WORSE = "worse"
    NOT_AFTER_CORRECTION = "not_after_correction"  # seen alone, but not among all
    AT_EDGE = "at_edge"  # worse, but its best value is at an end of the range tried
    NOT_SEEN = "not_seen"
    EQUAL_DIFFERENCES = "equal_differences"  # which have no interval
    FEW_SEEDS = "few_seeds"
    NO_COMMON_SEED = "no_common_seed"
    NO_RESULT = "no_result"


def classify_difference(difference: Difference | None, measure: Measure) -> Standing:
    """Returns how a row compares with the best one, or with the baseline."""
    if difference is None:
        return Standing.NO_COMMON_SEED
    if difference.low is None or difference.high is None:
        if difference.count < MIN_SEEDS:
            return Standing.FEW_SEEDS
        return Standing.EQUAL_DIFFERENCES
    if difference.low <= 0 <= difference.high:
        return Standing.NOT_SEEN
    if difference.p is not None and difference.p >= LEVEL:
        return Standing.NOT_AFTER_CORRECTION
    if measure.side * difference.mean > 0:
        return Standing.BETTER
    return Standing.WORSE


class Kind(StrEnum):
    """How a row compares with the baseline."""

    BASELINE = "baseline"
    NO_BASELINE = "no_baseline"  # at its value of the sweep
    NO_COMMON_SEED = "no_common_seed"
    BETTER = "better"
    WORSE = "worse"
    AHEAD = "ahead"  # without an interval
    BEHIND = "behind"
    ABOVE = "above"  # where no winner is named
    BELOW = "below"
    EQUAL = "equal"
    NOT_SEEN = "not_seen"
    NOT_AFTER_CORRECTION = "not_after_correction"

    @property
    def is_seen(self) -> bool:
        """Whether the rows differ, as far as can be told."""
        return self in (
            Kind.BETTER,
            Kind.WORSE,
            Kind.AHEAD,
            Kind.BEHIND,
            Kind.ABOVE,
            Kind.BELOW,
        )


class Basis(StrEnum):
    """What a comparison rests on: an interval, or the signs of the differences."""

    INTERVAL = "interval"
    ONE_SEED = "one_seed"
    BOTH_SEEDS = "both_seeds"
    ALL_SEEDS = "all_seeds"
    MEAN = "mean"  # not all seeds have the sign of the mean


class Comparison(NamedTuple):
    """One row compared with the baseline, by their paired difference.

    Attributes:
        kind: how they compare.
        basis: what that rests on; None if nothing was compared.
        difference: the difference, paired by seed; None without a common seed.
        comparisons: number of comparisons that its p-value is corrected for.
        with_tuning: the interval that includes the chance of tuning; None if unknown.
        clause: the comparison in words, such as "better by 0.80 points [0.50, 1.10]".
    """

    kind: Kind
    basis: Basis | None = None
    difference: Difference | None = None
    comparisons: int = 1
    with_tuning: TuningInterval | None = None
    clause: str = ""

    @property
    def p(self) -> float | None:
        """The corrected p-value; None for one comparison, or without an interval."""
        return self.difference.p if self.difference and self.comparisons > 1 else None


class Row(NamedTuple):
    """One variant at one value of the sweep, at the end: a row of the table.

    Attributes:
        label: label of the variant, such as "bmuf --nesterov".
        algo: its algorithm, which several variants may share.
        point: value of the sweep, such as "workers=4"; "" without a sweep.
        seeds: number of runs.
        diverged: number of runs that diverged; result and loss leave them out.
        result: the study's measure at the end; None if no run has it.
        loss: the test loss; None if all runs diverged.
        lr: nominal learning rate.
        effective_lr: None for methods without one, NaN if none was found.
        steps: local steps of a run.
        tuned: the chosen values by flag; empty without tuning.
        bytes_per_worker: the most bytes that a worker sent; None if not counted.
        syncs: number of steps that send; None if not counted, or if seeds differ.
        command: command that makes these runs, without --seed.
        final: the measure at the end by seed, of runs that have it.
        comparison: the comparison with the baseline.
        seconds: modelled seconds of the whole run, by the network's name.
        to_target: modelled seconds until the mean reaches the target, by the network's
            name; None where it never does.
        steps_to_target: local steps until the mean reaches the target; None if it
            never does.
        at_edge: tuned flags whose chosen value is at an end of its range.
        tuning_shifts: how much better the row would be if other seeds had tuned it, in
            the unit of the measure, by draw (see `tuning_noise`); empty without tuning
            or with too few tuning seeds.
    """

    label: str
    algo: str
    point: str
    seeds: int
    diverged: int
    result: Spread | None
    loss: Spread | None
    lr: float
    effective_lr: float | None
    steps: int
    tuned: dict[str, Any]
    bytes_per_worker: float | None
    syncs: int | None
    command: str
    final: Mapping[int, float] = {}
    comparison: Comparison = Comparison(Kind.BASELINE, clause="baseline")
    seconds: Mapping[str, float] = {}
    to_target: Mapping[str, float | None] = {}
    steps_to_target: int | None = None
    at_edge: Sequence[str] = ()
    tuning_shifts: Sequence[float] = ()

    @property
    def name(self) -> str:
        """The variant, and the value of the sweep if there is one."""
        return variant_name(self.label, self.point)

    @property
    def has_edge_rate(self) -> bool:
        """Whether the tuned learning rate is at an end of the range tried."""
        return "lr" in self.at_edge


def list_points(rows: Sequence[Row]) -> list[str]:
    """Returns the values of the sweep, such as "workers=4"; none without a sweep."""
    points = dict.fromkeys(row.point for row in rows)
    return [point for point in points if point]


class Ranking(NamedTuple):
    """Rows grouped by how they compare with the best of them.

    Attributes:
        rows: all rows, in the order of --algos.
        top: the best row; None if no run has a result.
        standings: the other rows by how they compare with the best, with a list for
            each standing.
        comparisons: the number of comparisons that p-values are corrected for.
    """

    rows: Sequence[Row]
    top: Row | None
    standings: Mapping[Standing, Sequence[Row]]
    comparisons: int

    @property
    def candidates(self) -> list[Row]:
        """The best row, and all that are not known to be worse."""
        rows = [] if self.top is None else [self.top]
        for standing in (
            Standing.BETTER,
            Standing.NOT_AFTER_CORRECTION,
            Standing.NOT_SEEN,
            Standing.EQUAL_DIFFERENCES,
            Standing.FEW_SEEDS,
            Standing.NO_COMMON_SEED,
        ):
            rows += self.standings[standing]
        return rows


class Report(NamedTuple):
    """A study, ready to be shown.

    Attributes:
        measure: the measure that is compared.
        baseline: label of the variant to which all others are compared.
        rows: rows of the table, in the order of --algos.
        rankings: the rankings by the value of the sweep, by "" without one.
        terms: ONE_NOMINAL, for which no winner is named, BY_HAND or BY_DEFAULT; "" if
            learning rates are tuned or alike.
        rate_ratio: ratio of the largest to the smallest effective learning rate.
        target: the target for "time to target", unscaled; None without one.
        curves: the curves, in the order of the rows.
        networks: networks on which time is modelled.
        step_seconds: seconds of a worker's local step by row.
        step_seconds_origin: where they are from, in words.
        sweep: the swept flag; "" without a sweep.
        tuning: scores by variant and flag; empty without tuning.
        title: the title, such as "sync_sgd, bmuf and diloco on digits".
        lead: the answer in one line.
        numbers: up to three numbers beside it: value with unit, and meaning.
        headline: the answer in one or two sentences.
        sentences: a sentence about each variant against the baseline.
        remarks: warnings to the reader: diverged runs, edges, too few seeds, ….
        settings: settings to show, by name.
        environment: versions and machine to show, by name.
        command: the command that makes this study again.
        paper: the preset's name, title, source, found and differs; None without a
            preset.
    """

    measure: Measure
    baseline: str
    rows: Sequence[Row]
    rankings: Mapping[str, Ranking] = {}
    terms: str = ""
    rate_ratio: float = 1.0
    target: float | None = None
    curves: Sequence[Curve] = ()
    networks: Sequence[Network] = ()
    step_seconds: Sequence[float] = (0.0,)
    step_seconds_origin: str = ""
    sweep: str = ""
    tuning: Sequence[Tuning] = ()
    title: str = ""
    lead: str = ""
    numbers: Sequence[tuple[str, str]] = ()
    headline: str = ""
    sentences: Sequence[str] = ()
    remarks: Sequence[str] = ()
    settings: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    command: str = ""
    paper: Mapping[str, str] | None = None

    @property
    def top(self) -> Row | None:
        """The row with the best mean; None if no run has a result."""
        return leader(self.rows, self.measure)

    @property
    def metric_keys(self) -> set[str]:
        """The keys of the metrics that any curve has."""
        keys: set[str] = set()
        for curve in self.curves:
            keys |= curve.bands.keys()
        return keys


def leader(rows: Sequence[Row], measure: Measure) -> Row | None:
    """Returns the row with the best mean, the first of equal ones; None without any."""
    return next(iter(leaders(rows, measure)), None)


def leaders(rows: Sequence[Row], measure: Measure) -> list[Row]:
    """Returns all rows with the best mean; means that differ by rounding are equal."""
    scores = [
        (measure.side * row.result.mean, row) for row in rows if row.result is not None
    ]
    best_score = max((score for score, _ in scores), default=0.0)
    least_score = best_score - ROUNDING * abs(best_score)
    return [row for score, row in scores if score >= least_score]
