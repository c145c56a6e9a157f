"""What a report shows of a study: everything here is a figure or a sentence."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from experiments.cli.library import checks
from experiments.study.network import Network
from experiments.study.statistics import Difference, Spread

# On which terms a comparison stands whose learning rates were not tuned.
ONE_NOMINAL, BY_HAND = "at one nominal rate", "at rates given by hand"


class Measure(NamedTuple):
    """What a study compares by.

    Attributes:
        key: its name in metrics.jsonl and summary.json.
        name: in words.
        higher_is_better: as an accuracy; of a loss lower is better.
        scale: what a figure is multiplied by to be shown: 100 for an accuracy.
        unit: of what is shown: "%", or "" for a loss.
        difference_unit: of differences of what is shown: "points", or "".
    """

    key: str
    name: str
    higher_is_better: bool
    scale: float = 1.0
    unit: str = ""
    difference_unit: str = ""


ACCURACY = Measure("test_accuracy", "test accuracy", True, 100.0, "%", "points")
LOSS = Measure("test_loss", "test loss", False)


def is_fine(summary: dict[str, Any]) -> bool:
    """Whether a run counts: its losses were finite, the last held-out figures too."""
    kept = (k for k in summary if k.startswith("test_") and k != ACCURACY.key)
    return not summary["diverged"] and all(summary[k] is not None for k in kept)


def measure(key: str | None, summaries: Sequence[dict[str, Any]]) -> Measure:
    """What to compare by.

    Args:
        key: in summary.json, such as "test_perplexity"; None takes the accuracy, where
            there is one, else the loss.
        summaries: of runs of the study.

    Raises:
        ValueError: the runs have no such figure.
    """
    figures = [summary.items() for summary in summaries if is_fine(summary)]
    known = {k for k, x in chain.from_iterable(figures) if x is not None}
    if key is None:
        return ACCURACY if ACCURACY.key in known else LOSS
    if figures:  # else there is nothing to compare
        checks.one_of(
            "--measure", key, sorted(k for k in known if k.startswith("test_"))
        )
    by_key = {ACCURACY.key: ACCURACY, LOSS.key: LOSS}
    return by_key.get(key) or Measure(key, key.replace("_", " "), False)


class Band(NamedTuple):
    """A figure over a run, by the seeds of an algorithm; lists of one length.

    Attributes:
        mean: over the seeds; unscaled, as in the files.
        low: mean - standard deviation; the mean itself where there is one seed.
        high: mean + standard deviation.
    """

    mean: list[float]
    low: list[float]
    high: list[float]


class Curve(NamedTuple):
    """One algorithm at one value of the sweep, over its run.

    Attributes:
        label: of the algorithm.
        point: of the sweep, such as "workers=4"; "" where there is none.
        steps: local steps of the evaluations.
        bands: by the metrics' keys, those that the runs have: train_loss, test_loss,
            test_accuracy, divergence, drift, pseudo_gradient, displacement_cosine, …
        bytes_per_worker: at the evaluations; None where it could not be counted.
        seconds: modelled, at the evaluations, by the network's name; empty as above.
    """

    label: str
    point: str
    steps: list[int]
    bands: dict[str, Band]
    bytes_per_worker: list[float] | None
    seconds: dict[str, list[float]]


class Row(NamedTuple):
    """One algorithm at one value of the sweep: a line of the headline table.

    Attributes:
        label: of the algorithm, such as "bmuf --nesterov".
        algo: its name: variants of one algorithm differ in their labels alone.
        point: of the sweep, such as "workers=4"; "" where there is none.
        seeds: runs that there are.
        diverged: those of them that diverged; they are not in measure and loss.
        measure: of the study's measure, at the end; None where all diverged.
        loss: of the held-out loss, as measure.
        difference: to the baseline, paired by seed; None for the baseline itself, and
            where there is nothing to compare.
        verdict: the same in words, a clause such as "better by 0.8 points [0.5, 1.1]".
        lr: nominal learning rate.
        effective_lr: None where there is none, NaN where none was found.
        steps: local steps of a run.
        tuned: what was chosen for it, by flag; empty where nothing was tuned.
        bytes_per_worker: each worker sent; None where it could not be counted.
        syncs: at how many steps.
        seconds: modelled, of the whole run, by the network's name.
        to_target: modelled seconds until the mean reaches the target, by the network's
            name; None where it never does.
        steps_to_target: local steps until then.
        command: that makes these runs, but for --seed.
    """

    label: str
    algo: str
    point: str
    seeds: int
    diverged: int
    measure: Spread | None
    loss: Spread | None
    difference: Difference | None
    verdict: str
    lr: float
    effective_lr: float | None
    steps: int
    tuned: dict[str, Any]
    bytes_per_worker: float | None
    syncs: int | None
    seconds: dict[str, float]
    to_target: dict[str, float | None]
    steps_to_target: int | None
    command: str


class Tuning(NamedTuple):
    """What one algorithm was tuned over.

    Attributes:
        label: of the algorithm.
        point: of the sweep, as in a row.
        flag: such as "lr".
        values: that were tried.
        scores: on validation data, by value: means of the measure over the tuning
            seeds (the best over other tuned flags); None where a run diverged.
        chosen: the best value.
        at_edge: whether it lies at an end of the range, so that better may lie beyond.
    """

    label: str
    point: str
    flag: str
    values: list[float]
    scores: list[float | None]
    chosen: float
    at_edge: bool


class Paper(NamedTuple):
    """What a preset repeats.

    Attributes:
        preset: its name.
        title: in one line.
        source: the paper or the code.
        found: what it found.
        differs: what is different here.
    """

    preset: str
    title: str
    source: str
    found: str
    differs: str


class Number(NamedTuple):
    """A number that stands out.

    Attributes:
        value: in words, with its unit.
        about: what it is.
    """

    value: str
    about: str


class Lead(NamedTuple):
    """The part of a page that is seen first.

    Attributes:
        line: the answer in one line.
        numbers: three beside it, or fewer where they are not known.
    """

    line: str
    numbers: list[Number]


class Report(NamedTuple):
    """A study, ready to be shown.

    Attributes:
        title: such as "sync_sgd, bmuf and diloco on digits".
        lead: the answer in a line and three numbers.
        headline: the answer in one or two sentences.
        sentences: one about each algorithm against the baseline.
        remarks: what a reader must know: diverged runs, edges, too few seeds, ….
        terms: ONE_NOMINAL, where no winner is named, or BY_HAND; "" where learning
            rates are tuned or alike.
        measure: what is compared.
        baseline: the label to which all others are compared.
        target: of "time to target", unscaled; None where there is none.
        rows: of the table, in the order in which they were asked for.
        curves: as rows.
        networks: on which time is modelled.
        step_seconds: of computation of one local step of one worker, and how it is
            known, in words.
        sweep: the flag that is swept, "" where there is none.
        tuning: empty where nothing was tuned.
        settings: name and value, to show.
        environment: name and value, to show.
        command: that makes this study again.
        paper: of its preset, if it has one.
    """

    title: str
    lead: Lead
    headline: str
    sentences: list[str]
    remarks: list[str]
    terms: str
    measure: Measure
    baseline: str
    target: float | None
    rows: list[Row]
    curves: list[Curve]
    networks: list[Network]
    step_seconds: tuple[float, str]
    sweep: str
    tuning: list[Tuning]
    settings: dict[str, str]
    environment: dict[str, str]
    command: str
    paper: Paper | None
