"""The records of a report: every field is a number or a sentence to show."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.study.runs import Tuning
from experiments.study.statistics import ROUNDING, Band, Difference, Measure, Spread
from experiments.study.variants import name_at
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


class Comparison(NamedTuple):
    """One row compared with another, by their paired difference.

    Attributes:
        verdict: "better", "worse"; "above", "below" where no winner is named; "ahead",
            "behind" without an interval; "equal", "no difference seen", ….
        kind: better, worse, unseen, doubtful (seen alone, but not after correction) or
            few (no interval); "" if nothing was compared.
        difference: the difference, paired by seed; None without a common seed.
        count: number of comparisons that its p-value is corrected for.
        amount: the difference in words, such as "0.80 points"; "" if none is seen.
        basis: its interval, such as "[0.50, 1.10]"; without one, its seeds in words.
        note: how certain the difference is, in words.
        retuned: the interval that also accounts for the noise of tuning; None if
            unknown.
    """

    verdict: str
    kind: str = ""
    difference: Difference | None = None
    count: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]
    amount: str = ""
    basis: str = ""
    note: str = ""
    retuned: tuple[float, float] | None = None

    @property
    def clause(self) -> str:
        """The comparison without names: "better by 0.80 points [0.50, 1.10]"."""
        if not self.amount:
            return f"{self.verdict} {self.basis}".rstrip()
        if self.kind in ("unseen", "doubtful"):
            return f"{self.verdict}: {self.amount} {self.basis}".rstrip()
        return f"{self.verdict} by {self.amount} {self.basis}".rstrip()

    @property
    def p(self) -> float | None:
        """The corrected p-value; None for one comparison, or without an interval."""
        return self.difference.p if self.difference and self.count > 1 else None

    @property
    def p_text(self) -> str:
        """The corrected p-value: "p = 0.012"; "" without one."""
        if self.p is None:
            return ""
        return f"p = {self.p:.2g}" if self.p >= 0.0001 else "p below 0.0001"

    @property
    def sentence(self) -> str:
        """The clause, and how certain it is."""
        if self.p_text:
            return (
                f"{self.clause}{self.note}. Corrected for {self.count} comparisons, "
                f"{self.p_text}."
            )
        return f"{self.clause}{self.note}."


class Row(NamedTuple):
    """One variant at one value of the sweep, at the end: a row of the table.

    Attributes:
        label: label of the variant, such as "bmuf --nesterov".
        algo: its algorithm, which several variants may share.
        point: value of the sweep, such as "workers=4"; "" without a sweep.
        seeds: number of runs.
        diverged: number of runs that diverged; measure and loss leave them out.
        measure: the study's measure; None if no run has it.
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
        shortfalls: by how much the row would be worse if other seeds had tuned it, by
            resample; empty without tuning or with too few tuning seeds.
    """

    label: str
    algo: str
    point: str
    seeds: int
    diverged: int
    measure: Spread | None
    loss: Spread | None
    lr: float
    effective_lr: float | None
    steps: int
    tuned: dict[str, Any]
    bytes_per_worker: float | None
    syncs: int | None
    command: str
    final: Mapping[int, float] = {}
    comparison: Comparison = Comparison("")
    seconds: Mapping[str, float] = {}
    to_target: Mapping[str, float | None] = {}
    steps_to_target: int | None = None
    at_edge: Sequence[str] = ()
    shortfalls: Sequence[float] = ()

    @property
    def name(self) -> str:
        """The variant, and the value of the sweep if there is one."""
        return name_at(self.label, self.point)


class Ranking(NamedTuple):
    """Rows grouped by how they compare to the best of them.

    Attributes:
        rows: all rows, in the order of --algos.
        top: the best row; None if no run has a result.
        kinds: the other rows by the kind of their comparison to the best, or "lost" if
            none of their runs has a result, in the order of FINDINGS.
        comparisons: the number of comparisons that p-values are corrected for.
    """

    rows: Sequence[Row]
    top: Row | None
    kinds: Mapping[str, Sequence[Row]]
    comparisons: int

    @property
    def best(self) -> list[Row]:
        """The best row, and all that are not known to be worse."""
        alike = ("better", "doubtful", "unseen", "few")
        rows = [row for kind in alike for row in self.kinds[kind]]
        return rows if self.top is None else [self.top, *rows]


class Report(NamedTuple):
    """A study, ready to be shown.

    Attributes:
        measure: the measure that is compared.
        baseline: label of the variant to which all others are compared.
        rows: rows of the table, in the order of --algos.
        points: the rankings by the value of the sweep, by "" without one.
        terms: ONE_NOMINAL, for which no winner is named, BY_HAND or BY_DEFAULT; "" if
            learning rates are tuned or alike.
        times: ratio of the largest to the smallest effective learning rate.
        target: the target for "time to target", unscaled; None without one.
        curves: the curves, in the order of the rows.
        networks: networks on which time is modelled.
        step_seconds: seconds of a worker's local step by row, and their origin.
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
    points: Mapping[str, Ranking] = {}
    terms: str = ""
    times: float = 1.0
    target: float | None = None
    curves: Sequence[Curve] = ()
    networks: Sequence[Network] = ()
    step_seconds: tuple[Sequence[float], str] = ((0.0,), "")
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


def leader(rows: Sequence[Row], by: Measure) -> Row | None:
    """Returns the row with the best mean, the first of equal ones; None without any."""
    return next(iter(leaders(rows, by)), None)


def leaders(rows: Sequence[Row], by: Measure) -> list[Row]:
    """Returns all rows with the best mean; means that differ by rounding are equal."""
    means = [(by.side * r.measure.mean, r) for r in rows if r.measure is not None]
    best = max((mean for mean, _ in means), default=0.0)
    least = best - ROUNDING * abs(best)
    return [row for mean, row in means if mean >= least]
