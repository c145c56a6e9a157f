"""The settings of a report, and the warnings that its reader needs."""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.cli import terminal
from experiments.study.analysis import formatting
from experiments.study.analysis.formatting import PHRASES, counted, say
from experiments.study.analysis.results import Row
from experiments.study.config import TUNE_SHARE, StudyConfig
from experiments.study.runs import RunSet, Tuning
from experiments.study.statistics import ACCURACY, LOSS, MIN_SEEDS, Measure
from experiments.study.variants import Range


def settings(
    task: str, seeds: int, swept: Range | None, runs: Sequence[RunSet]
) -> dict[str, str]:
    """Returns the settings of the runs; where they differ, those of each run set."""
    shown = {"task": task, "seeds": f"0 to {seeds - 1}"}
    if sizes := _examples(runs):
        shown["examples"] = sizes
    if swept is not None:
        shown["swept"] = f"{swept.flag} over {', '.join(swept.values)}"
    each = [_settings(r.config) for r in runs]
    for name in dict.fromkeys(name for one in each for name in one):
        values = [str(one.get(name)) for one in each]
        # No run sets it, such as --clip-norm.
        if set(values) == {"None"}:
            continue
        pairs = (f"{r.name}: {x}" for r, x in zip(runs, values, strict=True))
        shown[name] = values[0] if len(set(values)) == 1 else "; ".join(pairs)
    return shown


def _examples(runs: Sequence[RunSet]) -> str:
    """Returns the sizes of the data sets; "" for runs of earlier versions."""
    sizes = runs[0].any.get("examples")
    if sizes is None:
        return ""
    found = [f"{sizes['train']:,} for training", f"{sizes['test']:,} for testing"]
    if tried := [x for x in runs[0].trials if x.summaries]:
        held_out = tried[0].any["examples"]["test"]
        found.append(f"{held_out:,} training examples held out for tuning")
    return ", ".join(found)


def _settings(config: Any) -> dict[str, Any]:
    """Returns the settings to show of a config.json; None for those without one."""
    names, own = PHRASES["settings"], config["settings"]
    return {
        # Runs of earlier versions lack some.
        **{name: own.get(key) for key, name in names.items()},
        names["sync_until"]: own["sync_until"] or None,
        "backend": config["backend"],
        "devices": f"{config['devices']} × {config['platform']}",
        "devices of a worker": terminal.mesh_text(config.get("mesh") or {}) or None,
        **{f"task: {k}": value for k, value in config["task_arguments"].items()},
    }


def remarks(
    config: StudyConfig,
    runs: Sequence[RunSet],
    rows: Sequence[Row],
    by: Measure,
    scores: Sequence[Tuning],
) -> Iterator[str]:
    """Yields the warnings that a reader of the figures needs."""
    gone = [row for row in rows if row.diverged]
    for i, row in enumerate(gone, 1):
        # Yielded once, after the last of them.
        is_last = i == len(gone) and any(x.measure for x in gone)
        yield formatting.diverged(row) + f" {say('others')}" * is_last
    if config.seeds < MIN_SEEDS:
        yield say("few_seeds", seeds=counted(config.seeds), enough=MIN_SEEDS)
    yield from _on_missing(config, runs)
    yield from _on_tuning(config, runs, scores)
    settings = [r.config["settings"] for r in runs]
    shares = {s["batch_size"] / s["workers"] for s in settings}
    if len(shares) > 1 and config.step_time is None:
        yield say("step_times")
    # Shards follow from the seed and the number of workers.
    if (kinds := {s["partition"] for s in settings}) != {"iid"}:
        yield say("partition", partition=", ".join(sorted(kinds)))
    sizes = {(r.point, r.config["settings"]["batch_size"]) for r in runs}
    if len(sizes) > len({r.point for r in runs}):
        yield say("batches")
    if by not in (ACCURACY, LOSS):
        yield say("measure", measure=by.name)
    yield from _on_sends(runs)


def _on_missing(config: StudyConfig, runs: Sequence[RunSet]) -> Iterator[str]:
    """Yields warnings about runs that failed."""
    for r in (x for made in runs for x in (made, *made.trials)):
        if count := len(r.seeds) - len(r.summaries):
            trial = r.trial if r.is_trial else ""
            name = " ".join(x for x in (r.name, trial) if x)
            are = "is" if count == 1 else "are"
            yield say("missing", name=name, count=count, seeds=len(r.seeds), are=are)
    there = {(r.variant.label, r.point) for r in runs}
    names = [
        " at ".join(x for x in (variant.label, point) if x)
        for variant in config.variants
        for point in variant.points
        if (variant.label, point) not in there
    ]
    if names:
        yield say("no_runs", names=", ".join(names))


def _on_tuning(
    config: StudyConfig, runs: Sequence[RunSet], scores: Sequence[Tuning]
) -> Iterator[str]:
    """Yields warnings about edges and trials."""
    edges: dict[tuple[str, float], list[str]] = {}
    for one in scores:
        if one.at_edge:
            name = " at ".join(x for x in (one.label, one.point) if x)
            edges.setdefault((one.flag, one.chosen), []).append(name)
    for (flag, chosen), names in edges.items():
        yield say("edge", name=", ".join(names), flag=flag, chosen=chosen)
    budgets = {len(r.trials) for r in runs}
    if len(budgets) > 1:
        yield say("budgets")
    flags = (" or --".join(each.flags) for each in config.tuned)
    tuned = ", --".join(flags).replace("_", "-")
    if tuned and max(budgets) == 1:
        yield say("untuned", tuned=tuned)
    elif tuned:
        yield say(
            "tuned",
            tuned=tuned,
            trials=max(budgets),
            tune_seeds=f"{config.tune_seeds} seed{'s'[: config.tune_seeds > 1]}",
            share=100 * TUNE_SHARE,
        )


def _on_sends(runs: Sequence[RunSet]) -> Iterator[str]:
    """Yields warnings about steps after the last sync and about uncertain bytes."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for r in runs:
        s = r.any
        # The center dates from the last sync: later local steps are not in it.
        late = s["steps"] - s["center_step"]
        if late > 0 and not s["diverged"]:
            key = "late_steps" if s["center_step"] else "no_sync"
            found.setdefault((key, s["steps"], late), []).append(r.name)
    for (key, steps, late), names in found.items():
        yield say(key, name=", ".join(names), steps=steps, late=late)
    if by_data := [r.name for r in runs if len(r.sends or ()) > 1]:
        yield say("by_data", by_data=", ".join(by_data))
    if unknown := [r.name for r in runs if r.any["sends"] is None]:
        yield say("unknown", unknown=", ".join(unknown))
    if (more := runs[0].any["not_counted"]) is not None:
        yield say("not_counted", not_counted=more)
