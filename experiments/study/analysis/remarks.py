"""What a report says about a study: settings, remarks, and a summary to read."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.cli import terminal
from experiments.study.analysis import formatting
from experiments.study.analysis.results import (
    ACCURACY,
    LOSS,
    Measure,
    Report,
    Row,
    Tuning,
)
from experiments.study.analysis.runs import Runs
from experiments.study.statistics import MIN_SEEDS
from experiments.study.tuning import Trials

if TYPE_CHECKING:
    from experiments.study.study import Study


def title(study: Study) -> str:
    """What is compared, on what."""
    labels = [entry.label for entry in study.spec.entries]
    first = ", ".join(labels[:-1])
    listed = f"{first} and {labels[-1]}" if first else labels[-1]
    return f"{listed} on {study.spec.task}"


def settings(study: Study, runs: list[Runs]) -> dict[str, str]:
    """What the runs were made with; where they differ, what each has."""
    shown: dict[str, str] = {"task": study.spec.task}
    shown["seeds"] = f"{study.seeds[0]} to {study.seeds[-1]}"
    if study.spec.sweep is not None:
        sweep = study.spec.sweep
        shown["swept"] = f"{sweep.flag} over {', '.join(sweep.values)}"
    each = [_settings(r) for r in runs]
    for name in dict.fromkeys(name for one in each for name in one):
        values = [str(one.get(name)) for one in each]
        if set(values) == {"None"}:
            continue
        same = len(set(values)) == 1
        pairs = zip(runs, values, strict=True)
        shown[name] = (
            values[0] if same else "; ".join(f"{r.name}: {v}" for r, v in pairs)
        )
    return shown


def _settings(r: Runs) -> dict[str, Any]:
    """Of the runs of one algorithm, by their files; None where there is none."""
    s, facts = r.config["settings"], r.config
    return {
        "workers": s["workers"],
        "local steps": s["steps"],
        "global batch": s["batch_size"],
        "inner optimizer": s["optimizer"],
        "momentum": s["momentum"],
        "weight decay": s["weight_decay"],
        "gradients clipped to": s["clip_norm"],
        "schedule": s["schedule"],
        "warm-up steps": s["warmup_steps"],
        "examples of a worker": s["partition"],
        "synchronous until step": s["sync_until"] or None,
        "optimizer state at syncs": s["opt_state_at_sync"],
        "backend": facts["backend"],
        "devices": f"{facts['devices']} × {facts['platform']}",
        **{f"task: {k}": value for k, value in facts["task_arguments"].items()},
    }


def environment(runs: list[Runs]) -> dict[str, str]:
    """Versions and the machine."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return {**runs[0].config["versions"], "machine": machine}


def diverged(r: Runs) -> str:
    """That runs diverged, as a sentence."""
    return f"{r.name} diverged in {r.diverged} of {len(r.summaries)} runs."


def remarks(
    study: Study,
    runs: list[Runs],
    by: Measure,
    tuned: list[Tuning],
    tried: list[Trials],
) -> list[str]:
    """What the reader of the figures should know."""
    found = [diverged(r) for r in runs if r.diverged]
    if any(r.fine for r in runs if r.diverged):
        found[-1] += " Figures are of the others."
    count = len(study.seeds)
    if count < MIN_SEEDS:
        seeds = "one seed" if count == 1 else f"{count} seeds"
        found.append(
            f"{seeds}: too few for an interval, so nothing here is sure; --seeds "
            f"{MIN_SEEDS} goes on from these runs."
        )
    found += [
        f"{one.label}{f' at {one.point}' if one.point else ''}: the best --{one.flag}, "
        f"{one.chosen:g}, is at the edge of what was tried: better may lie beyond."
        for one in tuned
        if one.at_edge
    ]
    budgets = {len(trials) for trials in tried}
    if len(budgets) > 1:
        found.append(
            "Not all algorithms had as many trials: lists and whole numbers cannot be "
            "made finer for one that lacks a flag; other ranges can."
        )
    if study.spec.tune:
        names = ", --".join(each.flag.replace("_", "-") for each in study.spec.tune)
        seeds = f"{study.spec.tune_seeds} seed{'s'[: study.spec.tune_seeds > 1]}"
        found.append(
            f"--{names}: chosen for each algorithm by {max(budgets)} trials of {seeds} "
            f"(not those reported) on {100 * study.spec.share:g} % of the training "
            "data, held out; the figures reported are of the test data, of models "
            "trained on all training data."
        )
    kinds = {r.config["settings"]["partition"] for r in runs}
    if kinds != {"iid"}:
        partition = ", ".join(sorted(kinds))
        found.append(
            f"Each worker has examples of its own ({partition}): what it sees depends "
            "on the number of workers."
        )
    batches: dict[str, set[int]] = {}
    for r in runs:
        batches.setdefault(r.cell.point, set()).add(r.config["settings"]["batch_size"])
    if any(len(sizes) > 1 for sizes in batches.values()):
        found.append(
            "Global batches differ between algorithms: they see examples in the same "
            "order, cut into other batches."
        )
    if by not in (ACCURACY, LOSS):
        found.append(f"Of {by.name}, less is taken to be better.")
    return found + _remarks_on_figures(study, runs)


def _remarks_on_figures(study: Study, runs: list[Runs]) -> list[str]:
    found = []
    for r in runs:
        s = r.any
        if not s["diverged"] and not s["center_step"]:
            found.append(
                f"{r.name}: no sync came in {s['steps']} steps, so its figures are of "
                "the model as it was at the start."
            )
        elif not s["diverged"] and s["center_step"] < s["steps"]:
            found.append(
                f"{r.name}: the last {s['steps'] - s['center_step']} local steps, "
                "after the last sync, are not in its figures."
            )
    by_data = [r.name for r in runs if len(r.sends or ()) > 1]
    if by_data:
        found.append(
            f"What {', '.join(by_data)} sends depends on the seed, as the data decide: "
            "bytes and modelled times are means over the seeds."
        )
    sent = [r.name for r in runs if r.any["sends"] is None]
    if sent:
        found.append(
            f"What {', '.join(sent)} sends depends on more than the step: it is not "
            "counted."
        )
    if (more := runs[0].any["not_counted"]) is not None:
        found.append(f"Not counted in what each worker sends: {more}.")
    return found


def summary(report: Report, out: Path) -> str:
    """What a person reads on the screen when a study is done."""
    measure, difference = report.measure.name, formatting.against(report)
    headers = ("", measure, difference, "each sent", "lr -> effective lr")
    rows = [headers, *(_cells(row, report) for row in report.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(headers))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    remarks = [f"note: {remark}" for remark in report.remarks]
    files = f"report: {out / 'report.html'}"
    texts = [report.title, *lines, "", report.headline, *report.sentences, *remarks]
    return "\n".join([*(text.rstrip() for text in texts), files])


def _cells(row: Row, report: Report) -> tuple[str, ...]:
    by = report.measure
    figure = formatting.spread(row.measure, by)
    if row.diverged:
        figure += f" ({row.diverged} of {row.seeds} diverged)"
    return (
        " ".join(x for x in (row.label, row.point) if x),
        figure,
        row.verdict,
        formatting.sent(row),
        f"{terminal.rate(row.lr)} -> {terminal.rate(row.effective_lr)}",
    )
