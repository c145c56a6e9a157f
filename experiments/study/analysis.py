"""Builds the report of a study: reads the files of its runs, and compares its rows.

Rows are compared by their paired differences: from the baseline, and from the best.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from statistics import median
from typing import Any

import numpy as np

from experiments.command.factories import OWN
from experiments.command.words import parameter
from experiments.study import presets, results, sentences, statistics
from experiments.study.config import StudyConfig
from experiments.study.results import ONE_NOMINAL, Comparison, Curve, Report, Row
from experiments.study.runs import RunSet, Tuning, tuning_of
from experiments.study.sentences import factor, number, say
from experiments.study.statistics import LOSS, ROUNDING, Difference, Measure
from syncalgos.network import Network, modelled_seconds

# Effective rates whose ratio is larger are not comparable.
APART = 1.5

Pairs = Sequence[tuple[Row, Row]]


def report(config: StudyConfig, runs: Sequence[RunSet], command: str) -> Report:
    """Returns the report of a study, a function of its files alone.

    Args:
        config: the study.
        runs: the runs to report, with the content of their files.
        command: command that makes the study again.

    Raises:
        ValueError: the runs lack the requested measure.
    """
    summaries = [s for r in runs for s in r.summaries.values()]
    by = statistics.measure(config.measure, summaries)
    scores = [one for r in runs for one in tuning_of(r, by)]
    rows = [row_of(r, by, scores) for r in runs]
    # At different learning rates the rates would decide the winner.
    terms, times, unfair = rates(config, rows)
    label = config.compared_to
    is_named = terms != ONE_NOMINAL
    is_given = config.baseline is not None
    rows, said = against_baseline(rows, label, by, is_named, is_given)
    seconds, how = _step_times(config.step_time, runs)
    pairs = zip(runs, seconds, strict=True)
    curves = [curve_of(r, x, config.networks, config.fused) for r, x in pairs]
    rows = [_timed(*x, by, config.target) for x in zip(rows, curves, strict=True)]
    about = sentences.settings(config, runs)
    found = Report(
        measure=by,
        baseline=label,
        rows=rows,
        points=rankings(rows, by),
        terms=terms,
        times=times,
        target=config.target,
        # Times on networks that nobody named are in tables alone.
        curves=curves if config.network else [c._replace(seconds={}) for c in curves],
        networks=list(config.networks),
        step_seconds=(seconds, how),
        sweep=config.swept.flag if config.swept else "",
        tuning=scores,
        title=sentences.titled([x.label for x in config.variants], about["task"]),
        sentences=said,
        settings=about,
        environment=sentences.environment(runs),
        command=command,
        paper=presets.paper(config.preset) if config.preset in presets.NAMES else None,
    )
    law, told = sentences.laws(scores)
    # For a single variant the law is the whole answer.
    is_law = bool(law) and len(config.variants) == 1
    told = told if is_law else [sentences.answer(found), *told]
    return found._replace(
        lead=law if is_law else sentences.lead(found),
        numbers=sentences.numbers(found),
        headline="\n".join(told),
        remarks=[*unfair, *sentences.remarks(config, runs, found)],
    )


def _timed(row: Row, curve: Curve, by: Measure, target: float | None) -> Row:
    """Returns the row with its modelled times, to the target and in total."""
    clocks = curve.seconds.items()
    at = None
    if target is not None and by.key in curve.bands:
        # The first evaluation at which the mean reaches the target.
        least = by.side * target - ROUNDING * abs(target)
        means = enumerate(curve.bands[by.key].mean)
        at = next((i for i, x in means if by.side * x >= least), None)
    return row._replace(
        seconds={name: clock[-1] for name, clock in clocks},
        to_target={n: None if at is None else clock[at] for n, clock in clocks},
        steps_to_target=None if at is None else curve.steps[at],
    )


def _step_times(given: float | None, runs: Sequence[RunSet]) -> tuple[list[float], str]:
    """Returns the seconds of a worker's local step by run set, and their origin."""
    if given is not None:
        return [given for _ in runs], "as given"
    # One time for all algorithms with equal work: on a shared machine their own
    # arithmetic is within the noise.
    times_by_work: dict[str, list[float]] = {}
    for r in runs:
        for s in r.summaries.values():
            if s["steps"] and s["seconds"]:
                devices_time = s["seconds"] / s["steps"] * s["devices"]
                step_seconds = devices_time / _size(s) / s["workers"]
                times_by_work.setdefault(_work(r), []).append(step_seconds)
    if not times_by_work:
        return [0.0 for _ in runs], "not measured"
    all_times = [*chain(*times_by_work.values())]
    seconds = [median(times_by_work.get(_work(r), all_times)) for r in runs]
    platform = runs[0].any["platform"]
    if all(_size(r.any) == 1 for r in runs):
        return seconds, (
            "the median of runs here with equal models, optimizers and batches, for a "
            f"worker that has one of these {platform} devices to itself"
        )
    return seconds, (
        "the median of runs here with equal models, optimizers and batches, for a "
        f"worker that has its own {platform} devices to itself"
    )


def _work(r: RunSet) -> str:
    """Returns what decides the time of a local step, beside the algorithm."""
    s = r.config["settings"]
    task = r.config["task_arguments"]
    return str([task, s["batch_size"] / s["workers"], s["optimizer"]])


def _size(summary: Mapping[str, Any]) -> int:
    """Returns the number of devices of a worker; earlier summaries do not say it."""
    return math.prod(summary.get("mesh", {}).values())


def curve_of(
    r: RunSet, step_seconds: float, networks: Sequence[Network], fused: bool
) -> Curve:
    """Returns the curve of runs that did not diverge; an empty one without any."""
    # Diverged runs would pull the mean away from what the others reach.
    shown = [[*map(_with_spread, r.lines[seed])] for seed in r.fine]
    # A run may have ended early: the longest has all evaluations.
    longest = max(shown, key=len, default=[])
    known = {}
    for key in longest[-1] if longest else ():
        values = [[line.get(key) for line in lines] for lines in shown]
        if any(x is not None for own in values for x in own):
            known[key] = statistics.band(values)
    # Not counted if any seed's bytes are not.
    is_counted = r.bytes_per_worker is not None
    beside = ("step", "bytes_per_worker", "seconds", "learning_rate")
    steps = [line["step"] for line in longest]
    seconds = {}
    if longest and r.sends is not None:
        s = r.any
        since = r.config["settings"]["sync_until"]
        how = s["workers"], step_seconds, s["sends"]["delay"], fused, since
        for network in networks:
            clocks = [modelled_seconds(sends, network, *how) for sends in r.sends]
            # The mean over the seeds, if the data decide what each of them sends.
            clock = np.mean(clocks, axis=0)
            seconds[network.name] = [float(clock[step - 1]) for step in steps]
    return Curve(
        r.variant.label,
        r.point,
        steps,
        {key: own for key, own in known.items() if key not in beside},
        known["bytes_per_worker"].mean if is_counted else None,
        seconds,
    )


def _with_spread(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line with the workers' losses replaced by their standard deviation."""
    line = dict(line)
    losses = line.pop("worker_losses", None)
    if losses and None not in losses:
        line["worker_loss_spread"] = float(np.std(losses))
    return line


def row_of(r: RunSet, by: Measure, scores: Sequence[Tuning]) -> Row:
    """Returns a row of the table, before comparisons and modelled times."""
    s = r.any
    final = r.final(by)
    losses = r.final(LOSS)
    own = [x for x in scores if (x.label, x.point) == (r.variant.label, r.point)]
    # A diverged run ended early and sent less, which must not count as saving.
    syncs = {x["syncs"] for x in r.fine.values()}
    return Row(
        label=r.variant.label,
        algo=r.variant.algo,
        point=r.point,
        seeds=len(r.summaries),
        diverged=r.diverged,
        measure=statistics.spread([*final.values()]) if final else None,
        loss=statistics.spread([*losses.values()]) if losses else None,
        lr=s["lr"],
        effective_lr=s["effective_lr"],
        steps=r.config["settings"]["steps"],
        tuned={k.replace("_", "-"): float(x) for k, x in r.values.items()},
        bytes_per_worker=r.bytes_per_worker,
        syncs=syncs.pop() if len(syncs) == 1 else None,
        command=r.command,
        final=final,
        at_edge=[x.flag for x in own if x.at_edge],
        shortfalls=own[0].shortfalls if own else (),
    )


def by_point(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows to compare with one another, at each value of a sweep."""
    points = [p for p in dict.fromkeys(row.point for row in rows) if p]
    # A variant without the swept flag is compared at every value.
    return {p: [x for x in rows if x.point in (p, "")] for p in points or [""]}


def against_baseline(
    rows: Sequence[Row], baseline: str, by: Measure, named: bool, is_given: bool
) -> tuple[list[Row], list[str]]:
    """Returns the rows with their comparisons to the baseline, and these in sentences.

    Args:
        rows: the rows to compare.
        baseline: label of the rows that all others are compared with.
        by: the measure.
        named: whether a winner is named. If not, "above" and "below" take the place of
            "better" and "worse". They also do if the worse row's best value is at an
            end of its range, because a value beyond it might be better.
        is_given: whether the baseline was named beforehand. If not, p-values are
            corrected for all pairs of rows.
    """
    at = {row.point: row for row in rows if row.label == baseline}
    # A row that is not swept can be compared to a baseline at one value only.
    sole = next(iter(at.values())) if len(at) == 1 else None
    bases = [at.get(x.point) or at.get("") or (None if x.point else sole) for x in rows]
    pairs = [(a, b) for a, b in zip(rows, bases, strict=True) if b and b is not a]
    groups = by_point([] if is_given else rows).values()
    others = [[row for row in group if row.label != baseline] for group in groups]
    rest = [pair for own in others for pair in combinations(own, 2)]
    found, count = compared(pairs, rest)
    differences = iter(found)
    judged = []
    told = []
    for row, base in zip(rows, bases, strict=True):
        comparison = Comparison("baseline")
        if base is None:
            comparison = Comparison(f"no {baseline} to compare to here")
        elif base is not row:
            difference = next(differences)
            loser = row if difference and by.side * difference.mean < 0 else base
            is_named = named and not loser.at_edge
            comparison = sentences.in_words(difference, by, count, is_named)
            comparison = comparison._replace(retuned=retuned(row, base, difference))
            told.append(f"{row.name} against {base.name}: {comparison.sentence}")
            pairs = ((x.name, sentences.lost(x)) for x in (row, base))
            told[-1] += "".join(f" {name}: {lost}." for name, lost in pairs if lost)
        judged.append(row._replace(comparison=comparison))
    return judged, told


def rankings(rows: Sequence[Row], by: Measure) -> dict[str, results.Ranking]:
    """Ranks rows by the differences of their final measures from the best.

    P-values are corrected for all pairs of rows, because any could have been the best.

    Args:
        rows: rows of the table.
        by: the measure.

    Returns:
        A ranking for each value of a sweep; one for "" without a sweep.
    """
    points = by_point(rows)
    tops = {point: results.leader(group, by) for point, group in points.items()}
    kinds = {point: {kind: [] for kind in sentences.FINDINGS} for point in points}
    at = []
    pairs = []
    rest = []
    for point, group in points.items():
        top = tops[point]
        if top:
            others = [row for row in group if row is not top]
            at += [(point, row) for row in others]
            pairs += [(row, top) for row in others]
            rest += combinations(others, 2)
    found, count = compared(pairs, rest)
    for (point, row), difference in zip(at, found, strict=True):
        kind = sentences.kind_of(difference, by) if row.measure else "lost"
        kinds[point]["edge" if kind == "worse" and row.at_edge else kind].append(row)
    return {
        x: results.Ranking(own, tops[x], kinds[x], count) for x, own in points.items()
    }


def compared(pairs: Pairs, rest: Pairs) -> tuple[list[Difference | None], int]:
    """Returns the differences of pairs, their p-values corrected, and for how many.

    Args:
        pairs: each a row, and the row that it is compared with.
        rest: further pairs that p-values are corrected for.
    """
    # A row that is not swept is compared at each value, but with another such row once.
    keys = [frozenset(map(id, pair)) for pair in (*pairs, *rest)]
    differences = [statistics.paired(a.final, b.final) for a, b in (*pairs, *rest)]
    once = dict(zip(keys, differences, strict=True))
    p = dict(zip(once, statistics.corrected([*once.values()]), strict=True))
    found = [
        d and d._replace(p=p[key]) for key, d in zip(keys, differences, strict=True)
    ]
    return found[: len(pairs)], sum(x is not None for x in p.values())


def retuned(
    a: Row, b: Row, difference: Difference | None
) -> tuple[float, float] | None:
    """Returns the 95 % interval of a difference that accounts for tuning, too.

    Each draw takes a mean difference from Student's distribution, and adds by how much
    the settings chosen by other tuning seeds are worse. The chosen setting looks better
    than it is on the seeds that chose it, so the interval tends to be too wide.

    Args:
        a: a row.
        b: the row that it is compared with.
        difference: their difference, from `paired`.

    Returns:
        None if a row is not tuned, or has too few tuning seeds or seeds.
    """
    if difference is None or difference.low is None or difference.high is None:
        return None
    if not (len(a.shortfalls) and len(b.shortfalls)):
        return None
    from scipy.special import stdtrit  # what --help must not wait for

    error = (difference.deviation or 0.0) / math.sqrt(difference.count)
    # One draw from each of equal parts of the distribution: with draws by chance alone,
    # the interval would be up to 5 % narrower than without the tuning.
    parts = np.random.default_rng(0).permutation(count := len(a.shortfalls))
    draws = stdtrit(difference.count - 1, (parts + 0.5) / count)
    draws = difference.mean + error * draws + np.subtract(a.shortfalls, b.shortfalls)
    low, high = np.quantile(draws, [0.025, 0.975], method="hazen")
    return float(low), float(high)


def rates(config: StudyConfig, rows: Sequence[Row]) -> tuple[str, float, list[str]]:
    """Compares the effective rates of the variants, at each value of the sweep.

    Args:
        config: the study.
        rows: rows of the table.

    Returns:
        ONE_NOMINAL, BY_HAND or BY_DEFAULT where rates were not tuned and effective ones
        differ, "" elsewhere; the ratio of the largest effective rate to the smallest;
        and remarks.
    """
    is_tuned = any("lr" in x.flags and len(x.values) > 1 for x in config.tuned)
    # One algorithm at several rates is a study of rates.
    methods: set[tuple[str, ...]] = set()
    for variant in config.variants:
        # Objects have no names that would tell them apart.
        name = variant.label if variant.algo == OWN else variant.algo
        own_flags = [x for x in variant.own_flags if parameter(x[0]) != "lr"]
        methods.add((name, *chain(*own_flags)))
    rows_by_point = by_point(rows)
    groups = [*rows_by_point.values()]
    unfair = [group for group in groups if _times(group) > APART]
    is_known = max(len(_effective(group)) for group in groups) > 1
    if is_tuned or len(methods) < 2 or (is_known and not unfair):
        return "", 1.0, []
    widest = max(groups, key=_times)
    rates = _effective(widest)
    ratio = _times(widest)
    unknown = ", ".join(r.name for r in widest if r.name not in rates)
    if not unfair:
        remark = say("rates_unknown", names=unknown)
        return "", ratio, [f"{remark} {say('tune_rates')}"]
    terms = results.BY_DEFAULT
    if all(len({r.lr for r in group}) == 1 for group in unfair):
        terms = ONE_NOMINAL
    elif any("lr" in variant.parameters for variant in config.variants):
        terms = results.BY_HAND
    nominal_rate = f" {number(widest[0].lr)}," if terms == ONE_NOMINAL else ""
    unknown_note = f", and that of {unknown} is not known" if unknown else ""
    # Other values of the sweep may have larger rates.
    points = [
        point
        for point, group in rows_by_point.items()
        if math.isclose(_times(group), ratio, rel_tol=ROUNDING)
    ]
    place = f" at {sentences.listed(points)}" if len(groups) > 1 else ""
    remark = say(
        "unfair",
        terms=terms,
        nominal_rate=nominal_rate,
        place=place,
        times=factor(ratio),
        low=_rate_of(min(rates.values()), rates),
        high=_rate_of(max(rates.values()), rates),
        unknown_note=unknown_note,
    )
    return terms, ratio, [f"{remark} {say('tune_rates')}"]


def _rate_of(rate: float, rates: Mapping[str, float]) -> str:
    """Returns a rate, and all that have it: "0.4 of bmuf and slowmo"."""
    names = [x for x, own in rates.items() if math.isclose(own, rate, rel_tol=ROUNDING)]
    return f"{number(rate)} of {sentences.listed(names)}"


def _effective(group: Sequence[Row]) -> dict[str, float]:
    """Returns the effective rates by name; sign methods have none."""
    found = {r.name: r.effective_lr for r in group}
    return {k: x for k, x in found.items() if x is not None and 0 < x < math.inf}


def _times(group: Sequence[Row]) -> float:
    """Returns the ratio of the largest effective rate to the smallest."""
    found = _effective(group).values() or [1.0]
    return max(found) / min(found)
