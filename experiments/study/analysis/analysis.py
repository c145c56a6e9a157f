"""From the files of a study's runs to what its report shows."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.study import tuning
from experiments.study.analysis import remarks
from experiments.study.analysis.claims import clause, verdict
from experiments.study.analysis.formatting import sentence
from experiments.study.analysis.headline import Contender, best, headline, unranked
from experiments.study.analysis.lead import lead
from experiments.study.analysis.rates import Rates, factor, rates
from experiments.study.analysis.results import (
    BY_HAND,
    LOSS,
    ONE_NOMINAL,
    Band,
    Curve,
    Measure,
    Report,
    Row,
    measure,
)
from experiments.study.analysis.runs import Runs
from experiments.study.analysis.targets import default_target, reached
from experiments.study.network import modelled_seconds
from experiments.study.statistics import (
    Difference,
    Spread,
    band,
    paired,
    spread,
)

if TYPE_CHECKING:
    from experiments.study.study import Study


def report(study: Study, runs: list[Runs], command: str) -> Report:
    """All that is to be shown.

    Args:
        study: what was asked for.
        runs: those to report.
        command: that makes the study again.

    Raises:
        ValueError: runs lack the measure that was asked for.
    """
    by = measure(study.own.measure, [s for r in runs for s in r.summaries.values()])
    step_seconds, how = _step_seconds(study, runs)
    curves = [_curve(study, r, step_seconds) for r in runs]
    target = study.own.target
    if target is None:
        target = default_target(_contenders(runs, by), by)
    fairness = rates(study.spec, runs, command)
    contenders = _by_point(runs, by)
    baseline = study.own.baseline or study.spec.entries[0].label
    tried = [tuning.trials(study.spec, r.point, study.out) for r in runs]
    rows, sentences, tuned = [], [], []
    for r, curve, trials in zip(runs, curves, tried, strict=True):
        difference, words, said = _compared(runs, r, by, baseline, fairness)
        own = tuning.report(study.spec, r.point, trials, by)
        row = _row(r, curve, by, target, {one.flag: one.chosen for one in own})
        rows.append(row._replace(difference=difference, verdict=words))
        sentences += [said] if said else []
        tuned += own
    sweep = study.spec.sweep.flag if study.spec.sweep else ""
    return Report(
        title=remarks.title(study),
        lead=lead(contenders, rows, by, baseline, fairness),
        headline=_headline(contenders, by, fairness),
        sentences=sentences,
        remarks=[*fairness.remarks, *remarks.remarks(study, runs, by, tuned, tried)],
        terms=fairness.terms,
        measure=by,
        baseline=baseline,
        target=target,
        rows=rows,
        curves=curves,
        networks=study.networks,
        step_seconds=(step_seconds, how),
        sweep=sweep,
        tuning=tuned,
        settings=remarks.settings(study, runs),
        environment=remarks.environment(runs),
        command=command,
        paper=study.preset.paper if study.preset else None,
    )


def _step_seconds(study: Study, runs: list[Runs]) -> tuple[float, str]:
    """Seconds of one worker's local step, and how it is known.

    One figure for all algorithms: their own arithmetic is within the noise of a shared
    machine.
    """
    if study.own.step_time is not None:
        return study.own.step_time, "as given"
    found = [
        s["seconds"] / s["steps"] * s["devices"] / s["workers"]
        for r in runs
        for s in r.summaries.values()
        if s["steps"] and s["seconds"]
    ]
    if not found:
        return 0.0, "not measured"
    kind = runs[0].any["platform"]
    return statistics.median(found), (
        f"the median of {len(found)} runs here, for a worker that has one of these "
        f"{kind} devices to itself"
    )


def _curve(study: Study, r: Runs, step_seconds: float) -> Curve:
    shown = [r.lines[seed] for seed in r.fine]
    if not shown:  # nothing to compare with others
        return Curve(r.cell.label, r.cell.point, [], {}, None, {})
    longest = max(shown, key=len)
    steps = [line["step"] for line in longest]
    keys = [k for k in longest[-1] if k not in ("step", "bytes_per_worker", "seconds")]
    bands = {}
    for key in keys:
        curves = [[line.get(key) for line in lines] for lines in shown]
        if any(x is not None for curve in curves for x in curve):
            bands[key] = Band(*band(curves))
    sent = [[line["bytes_per_worker"] for line in lines] for lines in shown]
    clocks = _clocks(study, r, step_seconds)
    seconds = {
        name: [float(clock[step - 1]) for step in steps]
        for name, clock in clocks.items()
    }
    counted = not any(x is None for curve in sent for x in curve)
    known = band(sent)[0] if counted else None
    return Curve(r.cell.label, r.cell.point, steps, bands, known, seconds)


def _clocks(study: Study, r: Runs, step_seconds: float) -> dict[str, np.ndarray]:
    """Modelled seconds after each local step, by network; none where not counted.

    Means over the seeds, where they do not send alike.
    """
    of_seeds = r.sends
    if of_seeds is None:
        return {}

    def clock(sends, network):
        return modelled_seconds(
            sends,
            network,
            r.any["workers"],
            step_seconds,
            delay=r.any["sends"]["delay"],
            fused=study.own.fused,
            since=r.config["settings"]["sync_until"],
        )

    return {
        network.name: np.mean([clock(sends, network) for sends in of_seeds], axis=0)
        for network in study.networks
    }


def _compared(
    runs: list[Runs], r: Runs, by: Measure, baseline: str, fairness: Rates
) -> tuple[Difference | None, str, str]:
    """The difference to the baseline, as a clause, and as sentences ("" for none)."""
    base = _counterpart(runs, r, baseline)
    if base is r:
        return None, "baseline", ""
    if base is None:
        return None, f"no {baseline} to compare to here", ""
    difference = paired(r.final(by), base.final(by))
    named = fairness.terms != ONE_NOMINAL  # a winner
    words = by.higher_is_better if named else None, by.scale, by.difference_unit
    said = [verdict(r.name, base.name, difference, *words) + "."]
    said += [remarks.diverged(each) for each in (r, base) if each.diverged]
    return difference, clause(difference, *words), " ".join(said)


def _row(
    r: Runs,
    curve: Curve,
    by: Measure,
    target: float | None,
    tuned: dict[str, float],
) -> Row:
    """A line of the table, yet to be compared."""
    s = r.any
    at = reached(curve, by, target) if r.fine else None
    clocks = curve.seconds if r.fine else {}
    return Row(
        label=r.cell.label,
        algo=r.point.entry.algo,
        point=r.cell.point,
        seeds=len(r.summaries),
        diverged=r.diverged,
        measure=_spread(r.final(by)),
        loss=_spread(r.final(LOSS)),
        difference=None,
        verdict="",
        lr=s["lr"],
        effective_lr=s["effective_lr"],
        steps=r.config["settings"]["steps"],
        tuned=tuned,
        bytes_per_worker=r.bytes_per_worker,
        syncs=s["syncs"] if r.fine else None,
        seconds={name: clock[-1] for name, clock in clocks.items()},
        to_target={
            name: None if at is None else clock[at] for name, clock in clocks.items()
        },
        steps_to_target=None if at is None else curve.steps[at],
        command=r.cell.command(),
    )


def _spread(final: dict[int, float]) -> Spread | None:
    """Over the seeds; None where there is none."""
    return spread(list(final.values())) if final else None


def _counterpart(runs: list[Runs], r: Runs, baseline: str) -> Runs | None:
    """The baseline's runs at the same value of the sweep, or without one."""
    same = [x for x in runs if x.cell.label == baseline]
    at = [x for x in same if x.cell.point in (r.cell.point, "")]
    return at[0] if at else same[0] if not r.cell.point and len(same) == 1 else None


def _by_point(runs: list[Runs], by: Measure) -> dict[str, list[Contender]]:
    """The algorithms at each value of a sweep, which are compared with one another."""
    points = dict.fromkeys(r.cell.point for r in runs)
    if len(points) > 1:
        points.pop("", None)
    groups = {p: [r for r in runs if r.cell.point in (p, "")] for p in points}
    return {point: _contenders(group, by) for point, group in groups.items()}


def _headline(points: dict[str, list[Contender]], by: Measure, fairness: Rates) -> str:
    """The answer; of a sweep, for each of its values."""
    found = []
    if fairness.terms == ONE_NOMINAL:
        found = [
            "At one nominal rate no winner is named: effective learning rates differ "
            f"{factor(fairness.times)}."
        ]
    found += [_answer(x, by, fairness.terms, point) for point, x in points.items()]
    return "\n".join(found)


def _answer(contenders: list[Contender], by: Measure, terms: str, point: str) -> str:
    """The figures of these algorithms, and the best of them if one can be named."""
    where = f"{point}: " if point else ""
    if terms == ONE_NOMINAL:
        text = unranked(contenders, by)
        return where + text if where else sentence(text)
    text = headline(contenders, by.name, by.higher_is_better, by.scale, by.unit)
    if terms == BY_HAND:
        return f"{where}{terms if where else sentence(terms)}, {text}"
    return where + text


def _contenders(runs: list[Runs], by: Measure) -> list[Contender]:
    finals = [r.final(by) for r in runs]
    measures = [_spread(own) for own in finals]
    top = best(measures, by.higher_is_better)
    return [
        Contender(
            label=r.cell.label,
            measure=of,
            difference=None if top in (None, i) else paired(own, finals[top]),
            diverged=r.diverged,
            seeds=len(r.summaries),
            bytes_per_worker=r.bytes_per_worker,
            syncs=_syncs(r.any),
        )
        for i, (r, own, of) in enumerate(zip(runs, finals, measures, strict=True))
    ]


def _syncs(summary: dict[str, Any]) -> str:
    """Says in how many steps a run sent something: 1/period of them, rounded down."""
    syncs, steps = summary["syncs"], summary["steps"]
    return f"{syncs} syncs in {steps} steps" if syncs and syncs < steps else ""
