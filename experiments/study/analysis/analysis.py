"""Builds the report of a study from the files of its runs."""

import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.study import presets
from experiments.study.analysis.comparison import against_baseline, leader, rankings
from experiments.study.analysis.rates import rates
from experiments.study.analysis.results import ONE_NOMINAL, Curve, Report, Row
from experiments.study.analysis.words import remarks
from experiments.study.analysis.words.answer import (
    answer,
    laws,
    lead,
    numbers,
    titled,
)
from experiments.study.config import StudyConfig
from experiments.study.network import Network, modelled_seconds
from experiments.study.runs import RunSet, Tuning, tuning_of
from experiments.study.statistics import (
    LOSS,
    ROUNDING,
    Measure,
    Spread,
    band,
    measure,
    spread,
)

# Distance of the target from the baseline's measure, as a fraction of that measure.
SHARE = 0.05


def report(config: StudyConfig, runs: Sequence[RunSet], command: str) -> Report:
    """Returns the report of a study, a function of its files alone.

    Args:
        config: the study.
        runs: the runs to report, with the content of their files.
        command: command that makes the study again.

    Raises:
        ValueError: the runs lack the requested measure.
    """
    by = measure(config.measure, [s for r in runs for s in r.summaries.values()])
    baseline = config.baseline or config.variants[0].label
    scores = [one for r in runs for one in tuning_of(r, by)]
    rows = [row_of(r, by, scores) for r in runs]
    seconds, how = _step_seconds(config.step_time, runs)
    curves = [curve_of(r, seconds, config.networks, config.fused) for r in runs]
    # At different learning rates the rates would decide the winner.
    terms, times, unfair = rates(config, rows)
    is_given = config.baseline is not None
    named = terms != ONE_NOMINAL
    rows, sentences = against_baseline(rows, baseline, by, named, is_given)
    bases = [row for row in rows if row.label == baseline]
    target = config.target or default_target(bases, by)
    pairs = zip(rows, curves, strict=True)
    rows = [_timed(row, curve, by, target) for row, curve in pairs]
    points = rankings(rows, by)
    law, found = laws(scores)
    # For a single variant the law is the whole answer.
    is_law = bool(law) and len(config.variants) == 1
    told = [] if is_law else [answer(points, by, terms, times)]
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Report(
        title=titled([x.label for x in config.variants], config.task),
        lead=law if is_law else lead(points, by, terms),
        numbers=numbers(points, rows, by, baseline, terms, times),
        headline="\n".join([*told, *found]),
        sentences=sentences,
        remarks=[*unfair, *remarks.remarks(config, runs, rows, by, scores)],
        terms=terms,
        measure=by,
        baseline=baseline,
        target=target,
        rows=rows,
        curves=curves,
        networks=list(config.networks),
        step_seconds=(seconds, how),
        sweep=config.swept.flag if config.swept else "",
        tuning=scores,
        settings=remarks.settings(config.task, config.seeds, config.swept, runs),
        environment={**runs[0].config["versions"], "machine": machine},
        command=command,
        paper=presets.paper(config.preset) if config.preset in presets.NAMES else None,
    )


def default_target(rows: Sequence[Row], by: Measure) -> float | None:
    """Returns a target 5 % from the baseline's measure, on the easier side.

    Other rows do not change it. In a sweep the baseline's best row sets it.

    Args:
        rows: the baseline's rows.
        by: the measure.
    """
    best = leader(rows, by)
    if best is None or best.measure is None:
        return None
    margin = SHARE * abs(best.measure.mean)
    target = by.side * best.measure.mean - margin
    if not margin:
        return by.side * target
    unit = 10.0 ** (math.floor(math.log10(margin)) - 1)
    # A mean may be a round number except for rounding: adding 1e-6 keeps it.
    return by.side * round(math.floor(target / unit + 1e-6) * unit, 12)


def _timed(row: Row, curve: Curve, by: Measure, target: float | None) -> Row:
    """Returns the row with its modelled times, to the target and in total."""
    at = None
    if target is not None and by.key in curve.bands:
        # The first evaluation at which the mean reaches the target.
        least = by.side * target - ROUNDING * abs(target)
        means = enumerate(curve.bands[by.key].mean)
        at = next((i for i, x in means if by.side * x >= least), None)
    return row._replace(
        seconds={name: clock[-1] for name, clock in curve.seconds.items()},
        to_target={
            name: None if at is None else clock[at]
            for name, clock in curve.seconds.items()
        },
        steps_to_target=None if at is None else curve.steps[at],
    )


def _step_seconds(given: float | None, runs: Sequence[RunSet]) -> tuple[float, str]:
    """Returns the seconds of one worker's local step, and their origin in words."""
    if given is not None:
        return given, "as given"
    # One time for all algorithms: on a shared machine their own arithmetic is within
    # the noise.
    found = [
        s["seconds"] / s["steps"] * s["devices"] / _size(s) / s["workers"]
        for r in runs
        for s in r.summaries.values()
        if s["steps"] and s["seconds"]
    ]
    if not found:
        return 0.0, "not measured"
    kind, sizes = runs[0].any["platform"], {_size(r.any) for r in runs}
    own = "one of these" if sizes == {1} else "its own"
    return statistics.median(found), (
        f"the median of {len(found)} runs here, for a worker that has {own} {kind} "
        "devices to itself"
    )


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
    values = {
        key: [[line.get(key) for line in lines] for lines in shown]
        for key in (longest[-1] if longest else ())
    }
    known = {
        key: band(own)
        for key, own in values.items()
        if any(x is not None for lines in own for x in lines)
    }
    # Not counted if any seed's bytes are not.
    is_counted = r.bytes_per_worker is not None
    beside = ("step", "bytes_per_worker", "seconds", "learning_rate")
    steps, seconds = [line["step"] for line in longest], {}
    if longest and r.sends is not None:
        s, since = r.any, r.config["settings"]["sync_until"]
        how = {"delay": s["sends"]["delay"], "fused": fused, "since": since}
        for network in networks:
            clocks = [
                modelled_seconds(sends, network, s["workers"], step_seconds, **how)
                for sends in r.sends
            ]
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
    s, final = r.any, r.final(by)
    own = [x for x in scores if (x.label, x.point) == (r.variant.label, r.point)]
    return Row(
        label=r.variant.label,
        algo=r.variant.algo,
        point=r.point,
        seeds=len(r.summaries),
        diverged=r.diverged,
        measure=_spread(final),
        loss=_spread(r.final(LOSS)),
        lr=s["lr"],
        effective_lr=s["effective_lr"],
        steps=r.config["settings"]["steps"],
        tuned={k.replace("_", "-"): float(x) for k, x in r.values.items()},
        bytes_per_worker=r.bytes_per_worker,
        # A diverged run ended early and sent less, which must not count as saving.
        syncs=s["syncs"] if r.fine else None,
        command=r.command,
        final=final,
        at_edge=[x.flag for x in own if x.at_edge],
        shortfalls=own[0].shortfalls if own else (),
    )


def _spread(final: Mapping[int, float]) -> Spread | None:
    """Returns the spread over the seeds; None without any."""
    return spread(list(final.values())) if final else None
