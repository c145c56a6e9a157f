"""The words of a report: title, settings, remarks, and a summary for the screen."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cli import terminal
from experiments.study.analysis import formatting
from experiments.study.analysis.headline import listed
from experiments.study.analysis.results import Report, Row
from experiments.study.config import StudyConfig
from experiments.study.grid import RunSet
from experiments.study.search_space import Range
from experiments.study.statistics import ACCURACY, LOSS, MIN_SEEDS, Measure
from experiments.study.tuning import Tuning


def title(config: StudyConfig) -> str:
    """Returns the variants and the task."""
    return f"{listed([x.label for x in config.variants])} on {config.task}"


def settings(
    task: str, seeds: int, swept: Range | None, runs: Sequence[RunSet]
) -> dict[str, str]:
    """Returns the settings of the runs; where they differ, those of each."""
    shown = {"task": task, "seeds": f"0 to {seeds - 1}"}
    if swept is not None:
        shown["swept"] = f"{swept.flag} over {', '.join(swept.values)}"
    each = [_settings(r.config) for r in runs]
    for name in dict.fromkeys(name for one in each for name in one):
        values = [str(one.get(name)) for one in each]
        # No run has it, such as --clip-norm.
        if set(values) == {"None"}:
            continue
        pairs = (f"{r.name}: {x}" for r, x in zip(runs, values, strict=True))
        shown[name] = values[0] if len(set(values)) == 1 else "; ".join(pairs)
    return shown


def _settings(config: Any) -> dict[str, Any]:
    """Returns the settings to show of a config.json; None for those without one."""
    s = config["settings"]
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
        "backend": config["backend"],
        "devices": f"{config['devices']} × {config['platform']}",
        **{f"task: {k}": value for k, value in config["task_arguments"].items()},
    }


def environment(versions: dict[str, str]) -> dict[str, str]:
    """Returns versions and the machine."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return {**versions, "machine": machine}


def diverged(r: RunSet) -> str:
    """Returns how many runs diverged, as a sentence."""
    return f"{r.name} diverged in {r.diverged} of {len(r.summaries)} runs."


def remarks(
    config: StudyConfig, runs: Sequence[RunSet], by: Measure, scores: Sequence[Tuning]
) -> list[str]:
    """Returns the warnings that a reader of the figures needs."""
    found = [diverged(r) for r in runs if r.diverged]
    # Said once, after the last of them.
    if any(r.fine for r in runs if r.diverged):
        found[-1] += " Figures are of the others."
    if config.seeds < MIN_SEEDS:
        seeds = "one seed" if config.seeds == 1 else f"{config.seeds} seeds"
        found.append(
            f"{seeds}: too few for an interval, so nothing here is sure; --seeds "
            f"{MIN_SEEDS} goes on from these runs."
        )
    found += _on_tuning(config, runs, scores)
    # Shards follow from the seed and the number of workers.
    kinds = {r.config["settings"]["partition"] for r in runs}
    if kinds != {"iid"}:
        partition = ", ".join(sorted(kinds))
        found.append(
            f"Each worker has examples of its own ({partition}): what it sees depends "
            "on the number of workers."
        )
    batches: dict[str, set[int]] = {}
    for r in runs:
        batches.setdefault(r.point, set()).add(r.config["settings"]["batch_size"])
    if any(len(sizes) > 1 for sizes in batches.values()):
        found.append(
            "Global batches differ between algorithms: they see examples in the same "
            "order, cut into other batches."
        )
    if by not in (ACCURACY, LOSS):
        found.append(f"Of {by.name}, less is taken to be better.")
    return [*found, *_on_syncs(runs), *_on_bytes(runs)]


def _on_tuning(
    config: StudyConfig, runs: Sequence[RunSet], scores: Sequence[Tuning]
) -> list[str]:
    """Returns warnings about edges and trials."""
    found = [
        f"{one.label}{f' at {one.point}' if one.point else ''}: the best --{one.flag}, "
        f"{one.chosen:g}, is at the edge of what was tried: better may lie beyond."
        for one in scores
        if one.at_edge
    ]
    budgets = {len(r.trials) for r in runs}
    if len(budgets) > 1:
        found.append(
            "Not all algorithms had as many trials: lists and whole numbers cannot be "
            "made finer for one that lacks a flag; other ranges can."
        )
    if config.tuned:
        names = ", --".join(each.flag.replace("_", "-") for each in config.tuned)
        seeds = f"{config.tune_seeds} seed{'s'[: config.tune_seeds > 1]}"
        found.append(
            f"--{names}: chosen for each algorithm by {max(budgets)} trials of {seeds} "
            f"(not those reported) on {100 * config.tune_share:g} % of the training "
            "data, held out; the figures reported are of the test data, of models "
            "trained on all training data."
        )
    return found


def _on_syncs(runs: Sequence[RunSet]) -> list[str]:
    """Returns warnings about local steps that are in no center."""
    found = []
    for r in runs:
        s = r.any
        # The center is that of the last sync: later local steps are not in it.
        if s["diverged"] or s["center_step"] >= s["steps"]:
            continue
        if not s["center_step"]:
            found.append(
                f"{r.name}: no sync came in {s['steps']} steps, so its figures are of "
                "the model as it was at the start."
            )
        else:
            found.append(
                f"{r.name}: the last {s['steps'] - s['center_step']} local steps, "
                "after the last sync, are not in its figures."
            )
    return found


def _on_bytes(runs: Sequence[RunSet]) -> list[str]:
    """Returns warnings about bytes that vary or are not counted."""
    found = []
    if by_data := [r.name for r in runs if len(r.sends or ()) > 1]:
        found.append(
            f"What {', '.join(by_data)} sends depends on the seed, as the data decide: "
            "bytes and modelled times are means over the seeds."
        )
    if unknown := [r.name for r in runs if r.any["sends"] is None]:
        found.append(
            f"What {', '.join(unknown)} sends depends on more than the step: it is not "
            "counted."
        )
    if (more := runs[0].any["not_counted"]) is not None:
        found.append(f"Not counted in what each worker sends: {more}.")
    return found


def summary(report: Report, out: Path) -> str:
    """Returns the summary that a person reads on the screen."""
    heads = ("", report.measure.name, formatting.against(report), "each sent")
    rows = [(*heads, "lr -> effective lr")]
    rows += [_cells(row, report.measure) for row in report.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    notes = [f"note: {remark}" for remark in report.remarks]
    texts = [report.title, *lines, "", report.headline, *report.sentences, *notes]
    files = f"report: {out / 'report.html'}"
    return "\n".join([*(text.rstrip() for text in texts), files])


def _cells(row: Row, by: Measure) -> tuple[str, ...]:
    """Returns the cells of a row of the screen's table."""
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
