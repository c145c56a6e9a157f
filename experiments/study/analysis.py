"""Builds the report of a study: reads the files of its runs, and compares its rows.

Rows are compared by their paired differences: from the baseline, and from the best.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from experiments.command.factories import YOUR_OWN
from experiments.command.words import parameter
from experiments.study import (
    answer,
    presets,
    remarks,
    results,
    sentences,
    settings,
    statistics,
)
from experiments.study.config import StudyConfig
from experiments.study.formats import format_factor, format_number, join_words
from experiments.study.results import (
    ONE_NOMINAL,
    Basis,
    Comparison,
    Curve,
    Kind,
    Ranking,
    Report,
    Row,
    Standing,
)
from experiments.study.runs import RunSet, Tuning, compute_tunings, find_measure
from experiments.study.sentences import say
from experiments.study.statistics import (
    LOSS,
    ROUNDING,
    Difference,
    Measure,
)
from experiments.study.tuning_noise import find_interval
from experiments.training.summary import Summary
from syncalgos.network import Network, modelled_seconds

# Effective rates whose ratio is larger are not comparable.
MAX_RATE_RATIO = 1.5
# Values of a line of metrics.jsonl that are no metrics.
NO_METRICS = ("step", "bytes_per_worker", "seconds", "learning_rate")

Pair = tuple[Row, Row]


def make_report(
    config: StudyConfig, run_sets: Sequence[RunSet], command: str
) -> Report:
    """Returns the report of a study, a function of its files alone.

    Args:
        config: the study.
        run_sets: the runs to report, with the content of their files.
        command: command that makes the study again.

    Raises:
        ValueError: the runs lack the requested measure.
    """
    measure = find_measure(config.measure, run_sets)
    tunings = []
    for run_set in run_sets:
        tunings += compute_tunings(run_set, measure)
    rows = [make_row(run_set, measure, tunings) for run_set in run_sets]
    # At different learning rates the rates would decide the winner.
    rate_terms = compare_rates(config, rows)
    rows, comparison_sentences = compare_rows(
        rows,
        config.baseline_label,
        measure,
        names_winner=rate_terms.terms != ONE_NOMINAL,
        has_baseline=config.baseline is not None,
    )
    step_seconds, step_seconds_origin = _step_times(config.step_time, run_sets)
    curves = [
        make_curve(run_set, seconds, config.networks, config.fused)
        for run_set, seconds in zip(run_sets, step_seconds, strict=True)
    ]
    rows = [
        add_times(row, curve, measure, config.target)
        for row, curve in zip(rows, curves, strict=True)
    ]
    if not config.network:
        # Times on networks that nobody named are in tables alone.
        curves = [curve._replace(seconds={}) for curve in curves]
    shown_settings = settings.list_settings(config, run_sets)
    labels = [variant.label for variant in config.variants]
    draft = Report(
        measure=measure,
        baseline=config.baseline_label,
        rows=rows,
        rankings=rank_rows(rows, measure),
        terms=rate_terms.terms,
        rate_ratio=rate_terms.ratio,
        target=config.target,
        curves=curves,
        networks=list(config.networks),
        step_seconds=step_seconds,
        step_seconds_origin=step_seconds_origin,
        sweep=config.swept.flag if config.swept else "",
        tuning=tunings,
        title=sentences.make_title(labels, shown_settings["task"]),
        sentences=comparison_sentences,
        settings=shown_settings,
        environment=settings.list_environment(run_sets),
        command=command,
        paper=presets.paper(config.preset) if config.preset in presets.NAMES else None,
    )
    law, law_sentences = answer.laws(tunings)
    if law and len(labels) == 1:
        # For a single variant the law is the whole answer.
        lead = law
        paragraphs = law_sentences
    else:
        lead = answer.lead(draft)
        paragraphs = [answer.answer(draft), *law_sentences]
    return draft._replace(
        lead=lead,
        numbers=answer.numbers(draft),
        headline="\n".join(paragraphs),
        remarks=[
            *rate_terms.remarks,
            *remarks.write_remarks(config, run_sets, draft),
        ],
    )


# Rows and curves.


def make_row(run_set: RunSet, measure: Measure, tunings: Sequence[Tuning]) -> Row:
    """Returns a row of the table, before comparisons and modelled times."""
    summary = run_set.first_summary
    final = run_set.final(measure)
    losses = run_set.final(LOSS)
    label = run_set.variant.label
    row_tunings = [
        tuning
        for tuning in tunings
        if (tuning.label, tuning.point) == (label, run_set.point)
    ]
    # A diverged run ended early and sent less, which must not count as saving.
    sync_counts = {finite.syncs for finite in run_set.finite.values()}
    return Row(
        label=label,
        algo=run_set.variant.algo,
        point=run_set.point,
        seeds=len(run_set.summaries),
        diverged=run_set.diverged,
        result=statistics.spread([*final.values()]) if final else None,
        loss=statistics.spread([*losses.values()]) if losses else None,
        lr=summary.lr,
        effective_lr=summary.effective_lr,
        steps=run_set.config["settings"]["steps"],
        tuned={
            flag.replace("_", "-"): float(value)
            for flag, value in run_set.values.items()
        },
        bytes_per_worker=run_set.bytes_per_worker,
        syncs=sync_counts.pop() if len(sync_counts) == 1 else None,
        command=run_set.command,
        final=final,
        at_edge=[tuning.flag for tuning in row_tunings if tuning.at_edge],
        tuning_shifts=row_tunings[0].tuning_shifts if row_tunings else (),
    )


def make_curve(
    run_set: RunSet, step_seconds: float, networks: Sequence[Network], fused: bool
) -> Curve:
    """Returns the curve of runs that did not diverge; an empty one without any."""
    # Diverged runs would pull the mean away from what the others reach.
    lines_by_run = []
    for seed in run_set.finite:
        lines_by_run.append([_with_spread(line) for line in run_set.lines[seed]])
    # A run may have ended early: the longest has all evaluations.
    longest = max(lines_by_run, key=len, default=[])
    bands = {}
    for key in longest[-1] if longest else ():
        values_by_run = []
        for lines in lines_by_run:
            values_by_run.append([line.get(key) for line in lines])
        if any(value is not None for value in chain.from_iterable(values_by_run)):
            bands[key] = statistics.band(values_by_run)
    bytes_per_worker = None
    # Not counted if any seed's bytes are not.
    if run_set.bytes_per_worker is not None:
        bytes_per_worker = bands["bytes_per_worker"].mean
    steps = [line["step"] for line in longest]
    seconds = {}
    if longest:
        for name, clock in _clocks(run_set, step_seconds, networks, fused).items():
            seconds[name] = [float(clock[step - 1]) for step in steps]
    return Curve(
        label=run_set.variant.label,
        point=run_set.point,
        steps=steps,
        bands={key: band for key, band in bands.items() if key not in NO_METRICS},
        bytes_per_worker=bytes_per_worker,
        seconds=seconds,
    )


def _with_spread(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line with the workers' losses replaced by their standard deviation."""
    line = dict(line)
    losses = line.pop("worker_losses", None)
    if losses and None not in losses:
        line["worker_loss_spread"] = float(np.std(losses))
    return line


def _clocks(
    run_set: RunSet, step_seconds: float, networks: Sequence[Network], fused: bool
) -> dict[str, np.ndarray]:
    """Returns the modelled time after each step, by network; none without counts."""
    summary = run_set.first_summary
    if run_set.sends is None or summary.sends is None:
        return {}
    clocks = {}
    for network in networks:
        clocks_of_seeds = []
        for sends in run_set.sends:
            clocks_of_seeds.append(
                modelled_seconds(
                    sends,
                    network,
                    summary.workers,
                    step_seconds,
                    summary.sends["delay"],
                    fused,
                    run_set.config["settings"]["sync_until"],
                )
            )
        # The mean over the seeds, if the data decide what each of them sends.
        clocks[network.name] = np.mean(clocks_of_seeds, axis=0)
    return clocks


def add_times(row: Row, curve: Curve, measure: Measure, target: float | None) -> Row:
    """Returns the row with its modelled times, to the target and in total."""
    seconds = {name: clock[-1] for name, clock in curve.seconds.items()}
    index = _find_target(curve, measure, target)
    if index is None:
        to_target = dict.fromkeys(curve.seconds)
        return row._replace(seconds=seconds, to_target=to_target)
    return row._replace(
        seconds=seconds,
        to_target={name: clock[index] for name, clock in curve.seconds.items()},
        steps_to_target=curve.steps[index],
    )


def _find_target(curve: Curve, measure: Measure, target: float | None) -> int | None:
    """Returns the first evaluation at which the mean reaches the target."""
    if target is None or measure.key not in curve.bands:
        return None
    least_score = measure.side * target - ROUNDING * abs(target)
    for index, mean in enumerate(curve.bands[measure.key].mean):
        if measure.side * mean >= least_score:
            return index
    return None


def _step_times(
    step_time: float | None, run_sets: Sequence[RunSet]
) -> tuple[list[float], str]:
    """Returns the seconds of a worker's local step by run set, and their origin."""
    if step_time is not None:
        return [step_time for _ in run_sets], say("step_time.given")
    # One time for all algorithms with equal work: on a shared machine their own
    # arithmetic is within the noise.
    times_by_work: dict[str, list[float]] = {}
    all_times = []
    for run_set in run_sets:
        for summary in run_set.summaries.values():
            if summary.steps and summary.seconds:
                devices_time = summary.seconds / summary.steps * summary.devices
                step_seconds = devices_time / _size(summary) / summary.workers
                times_by_work.setdefault(_work(run_set), []).append(step_seconds)
                all_times.append(step_seconds)
    if not all_times:
        return [0.0 for _ in run_sets], say("step_time.not_measured")
    seconds = [
        median(times_by_work.get(_work(run_set), all_times)) for run_set in run_sets
    ]
    platform = run_sets[0].first_summary.platform
    if all(_size(run_set.first_summary) == 1 for run_set in run_sets):
        return seconds, say("step_time.one_device", platform=platform)
    return seconds, say("step_time.devices", platform=platform)


def _work(run_set: RunSet) -> str:
    """Returns what decides the time of a local step, beside the algorithm."""
    values = run_set.config["settings"]
    worker_batch = values["batch_size"] / values["workers"]
    return str([run_set.config["task_arguments"], worker_batch, values["optimizer"]])


def _size(summary: Summary) -> int:
    """Returns the number of devices of a worker."""
    return math.prod(summary.mesh.values())


# Comparisons.


def group_by_point(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows to compare with one another, at each value of a sweep."""
    rows_by_point = {}
    for point in results.list_points(rows) or [""]:
        # A variant without the swept flag is compared at every value.
        rows_by_point[point] = [row for row in rows if row.point in (point, "")]
    return rows_by_point


def compare_rows(
    rows: Sequence[Row],
    baseline: str,
    measure: Measure,
    *,
    names_winner: bool,
    has_baseline: bool,
) -> tuple[list[Row], list[str]]:
    """Returns the rows with their comparisons to the baseline, and these in sentences.

    Args:
        rows: the rows to compare.
        baseline: label of the rows that all others are compared with.
        measure: the measure.
        names_winner: whether a winner is named. If not, "above" and "below" take the
            place of "better" and "worse". They also do if the worse row's best value is
            at an end of its range, because a value beyond it might be better.
        has_baseline: whether the baseline was named beforehand. If not, p-values are
            corrected for all pairs of rows.
    """
    bases = _find_bases(rows, baseline)
    pairs = [
        (row, base)
        for row, base in zip(rows, bases, strict=True)
        if base is not None and base is not row
    ]
    other_pairs: list[Pair] = []
    if not has_baseline:
        for group in group_by_point(rows).values():
            compared_group = [row for row in group if row.label != baseline]
            other_pairs += combinations(compared_group, 2)
    differences, count = compare_pairs(pairs, other_pairs)
    remaining_differences = iter(differences)
    compared_rows = []
    comparison_sentences = []
    for row, base in zip(rows, bases, strict=True):
        if base is None:
            comparison = _compare_with_none(Kind.NO_BASELINE, measure, baseline)
            compared_rows.append(row._replace(comparison=comparison))
        elif base is row:
            comparison = _compare_with_none(Kind.BASELINE, measure, baseline)
            compared_rows.append(row._replace(comparison=comparison))
        else:
            difference = next(remaining_differences)
            is_worse = difference and measure.side * difference.mean < 0
            loser = row if is_worse else base
            comparison = compare(
                difference,
                measure,
                comparisons=count,
                names_winner=names_winner and not loser.at_edge,
            )
            with_tuning = find_interval(
                difference, row.tuning_shifts, base.tuning_shifts
            )
            comparison = comparison._replace(with_tuning=with_tuning)
            compared_row = row._replace(comparison=comparison)
            compared_rows.append(compared_row)
            comparison_sentences.append(sentences.write_comparison(compared_row, base))
    return compared_rows, comparison_sentences


def _find_bases(rows: Sequence[Row], baseline: str) -> list[Row | None]:
    """Returns the row of the baseline that each row is compared with; None without.

    A row's `point` names its value of the sweep, such as "period=8"; it is "" for a row
    that is not swept.
    """
    base_by_point = {row.point: row for row in rows if row.label == baseline}
    bases = []
    for row in rows:
        base_row = base_by_point.get(row.point) or base_by_point.get("")
        # A row that is not swept can be compared to a baseline at one value only.
        if base_row is None and not row.point and len(base_by_point) == 1:
            [base_row] = base_by_point.values()
        bases.append(base_row)
    return bases


def _compare_with_none(kind: Kind, measure: Measure, baseline: str) -> Comparison:
    comparison = Comparison(kind)
    clause = sentences.write_clause(comparison, measure, baseline)
    return comparison._replace(clause=clause)


def compare(
    difference: Difference | None,
    measure: Measure,
    comparisons: int = 1,
    *,
    names_winner: bool = True,
) -> Comparison:
    """Returns a comparison with its clause.

    Args:
        difference: the difference, from `paired`; None without a common seed.
        measure: the measure of the difference.
        comparisons: number of comparisons that its p-value is corrected for.
        names_winner: whether a winner is named. If not, "above" and "below" take the
            place of "better" and "worse".
    """
    if difference is None:
        return _compare_with_none(Kind.NO_COMMON_SEED, measure, baseline="")
    kind = _choose_kind(difference, measure, names_winner=names_winner)
    basis = _choose_basis(difference, kind)
    comparison = Comparison(kind, basis, difference, comparisons)
    clause = sentences.write_clause(comparison, measure, baseline="")
    return comparison._replace(clause=clause)


def _choose_kind(
    difference: Difference, measure: Measure, *, names_winner: bool
) -> Kind:
    """Returns how a row compares with the baseline."""
    mean = difference.mean
    if mean == 0 and not difference.deviation:
        return Kind.EQUAL
    standing = results.classify_difference(difference, measure)
    if standing is Standing.NOT_AFTER_CORRECTION:
        return Kind.NOT_AFTER_CORRECTION
    if standing is Standing.NOT_SEEN or mean == 0:
        return Kind.NOT_SEEN
    if not names_winner:
        return Kind.ABOVE if mean > 0 else Kind.BELOW
    if standing in (Standing.FEW_SEEDS, Standing.EQUAL_DIFFERENCES):
        return Kind.AHEAD if measure.side * mean > 0 else Kind.BEHIND
    return Kind.BETTER if standing is Standing.BETTER else Kind.WORSE


def _choose_basis(difference: Difference, kind: Kind) -> Basis:
    """Returns what a comparison rests on."""
    if kind is not Kind.EQUAL and difference.low is not None:
        return Basis.INTERVAL
    if not difference.same_sign:
        return Basis.MEAN
    if difference.count == 1:
        return Basis.ONE_SEED
    if difference.count == 2:
        return Basis.BOTH_SEEDS
    return Basis.ALL_SEEDS


def rank_rows(rows: Sequence[Row], measure: Measure) -> dict[str, Ranking]:
    """Ranks rows by the differences of their final measures from the best.

    P-values are corrected for all pairs of rows, because any could have been the best.

    Args:
        rows: rows of the table.
        measure: the measure.

    Returns:
        A ranking for each value of a sweep; one for "" without a sweep.
    """
    rows_by_point = group_by_point(rows)
    tops = {}
    point_of_pair = []
    pairs: list[Pair] = []
    other_pairs: list[Pair] = []
    for point, group in rows_by_point.items():
        top = results.leader(group, measure)
        tops[point] = top
        if top is None:
            continue
        lower_rows = [row for row in group if row is not top]
        for row in lower_rows:
            point_of_pair.append(point)
            pairs.append((row, top))
        other_pairs += combinations(lower_rows, 2)
    differences, count = compare_pairs(pairs, other_pairs)
    rows_by_standing: dict[str, dict[Standing, list[Row]]] = {}
    for point in rows_by_point:
        rows_by_standing[point] = {standing: [] for standing in Standing}
    compared_pairs = zip(point_of_pair, pairs, differences, strict=True)
    for point, (row, _), difference in compared_pairs:
        standing = results.classify_difference(difference, measure)
        if row.result is None:
            standing = Standing.NO_RESULT
        elif standing is Standing.WORSE and row.at_edge:
            standing = Standing.AT_EDGE
        rows_by_standing[point][standing].append(row)
    rankings_by_point = {}
    for point, group in rows_by_point.items():
        rankings_by_point[point] = Ranking(
            rows=group,
            top=tops[point],
            standings=rows_by_standing[point],
            comparisons=count,
        )
    return rankings_by_point


def compare_pairs(
    pairs: Sequence[Pair], other_pairs: Sequence[Pair]
) -> tuple[list[Difference | None], int]:
    """Returns the differences of pairs, their p-values corrected, and for how many.

    Args:
        pairs: each a row, and the row that it is compared with.
        other_pairs: further pairs that p-values are corrected for.
    """
    # A row that is not swept is compared at each value, but with another such row once.
    difference_by_pair: dict[frozenset[int], Difference | None] = {}
    differences = []
    for row, base in (*pairs, *other_pairs):
        difference = statistics.find_difference(row.final, base.final)
        difference_by_pair[_pair_key(row, base)] = difference
        differences.append(difference)
    p_values = statistics.correct_p_values([*difference_by_pair.values()])
    p_by_pair = dict(zip(difference_by_pair, p_values, strict=True))
    corrected_differences = []
    for (row, base), difference in zip(pairs, differences, strict=False):
        if difference is not None:
            difference = difference._replace(p=p_by_pair[_pair_key(row, base)])
        corrected_differences.append(difference)
    return corrected_differences, sum(p is not None for p in p_values)


def _pair_key(row: Row, base: Row) -> frozenset[int]:
    return frozenset((id(row), id(base)))


# Learning rates.


class RateTerms(NamedTuple):
    """At which rates algorithms are compared.

    Attributes:
        terms: ONE_NOMINAL, BY_HAND or BY_DEFAULT where rates were not tuned and
            effective ones differ; "" elsewhere.
        ratio: the ratio of the largest effective rate to the smallest.
        remarks: remarks.
    """

    terms: str = ""
    ratio: float = 1.0
    remarks: Sequence[str] = ()


def compare_rates(config: StudyConfig, rows: Sequence[Row]) -> RateTerms:
    """Compares the effective rates of the variants, at each value of the sweep."""
    is_tuned = any("lr" in axis.flags and len(axis.values) > 1 for axis in config.tuned)
    rows_by_point = group_by_point(rows)
    groups = [*rows_by_point.values()]
    unfair_groups = [group for group in groups if _rate_ratio(group) > MAX_RATE_RATIO]
    has_rates = max(len(_effective_rates(group)) for group in groups) > 1
    is_fair = has_rates and not unfair_groups
    if is_tuned or _count_methods(config) < 2 or is_fair:
        return RateTerms()
    widest_group = max(groups, key=_rate_ratio)
    ratio = _rate_ratio(widest_group)
    effective_rates = _effective_rates(widest_group)
    names_without_rate = join_words(
        [row.name for row in widest_group if row.name not in effective_rates]
    )
    if not unfair_groups:
        remark = say("remark.rates_unknown", names=names_without_rate)
        return RateTerms("", ratio, [remark])
    terms = _choose_terms(config, unfair_groups)
    terms_text = terms
    if terms == ONE_NOMINAL:
        nominal_rate = format_number(widest_group[0].lr)
        terms_text = say("terms.one_nominal", rate=nominal_rate)
    fields = {
        "terms": terms_text,
        "times": format_factor(ratio),
        "low": _name_rate(min(effective_rates.values()), effective_rates),
        "high": _name_rate(max(effective_rates.values()), effective_rates),
    }
    if len(groups) == 1:
        remark = say("remark.unfair.everywhere", **fields)
    else:
        # Other values of the sweep may have larger rates.
        points = [
            point
            for point, group in rows_by_point.items()
            if math.isclose(_rate_ratio(group), ratio, rel_tol=ROUNDING)
        ]
        remark = say("remark.unfair.at_points", **fields, points=join_words(points))
    rate_remarks = [remark]
    if names_without_rate:
        rate_remarks.append(say("remark.rate_unknown", names=names_without_rate))
    return RateTerms(terms, ratio, rate_remarks)


def _count_methods(config: StudyConfig) -> int:
    """Returns the number of algorithms; one at several rates is a study of rates."""
    methods: set[tuple[str, ...]] = set()
    for variant in config.variants:
        # Objects have no names that would tell them apart.
        name = variant.label if variant.algo == YOUR_OWN else variant.algo
        own_flags = [
            words for words in variant.own_flags if parameter(words[0]) != "lr"
        ]
        methods.add((name, *chain(*own_flags)))
    return len(methods)


def _choose_terms(config: StudyConfig, unfair_groups: Sequence[Sequence[Row]]) -> str:
    """Returns at which rates the algorithms of groups are compared."""
    if all(_has_one_rate(group) for group in unfair_groups):
        return ONE_NOMINAL
    if any("lr" in variant.parameters for variant in config.variants):
        return results.BY_HAND
    return results.BY_DEFAULT


def _has_one_rate(rows: Sequence[Row]) -> bool:
    return len({row.lr for row in rows}) == 1


def _name_rate(rate: float, rates: Mapping[str, float]) -> str:
    """Returns a rate, and all that have it: "0.4 of bmuf and slowmo"."""
    names = [
        name
        for name, other_rate in rates.items()
        if math.isclose(other_rate, rate, rel_tol=ROUNDING)
    ]
    return say("terms.rate_of", rate=format_number(rate), names=join_words(names))


def _effective_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the effective rates by name; sign methods have none."""
    rates = {}
    for row in rows:
        if row.effective_lr is not None and 0 < row.effective_lr < math.inf:
            rates[row.name] = row.effective_lr
    return rates


def _rate_ratio(rows: Sequence[Row]) -> float:
    """Returns the ratio of the largest effective rate to the smallest."""
    rates = [*_effective_rates(rows).values()]
    if not rates:
        return 1.0
    return max(rates) / min(rates)
