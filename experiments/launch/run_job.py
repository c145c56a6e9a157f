"""One run of the command line, from its config to its files."""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
from safetensors import SafetensorError

import syncalgos
from experiments import exit_codes
from experiments.checkpoint import lock
from experiments.checkpoint.background import Background
from experiments.checkpoint.manager import FOLDER, CheckpointManager
from experiments.cli import terminal
from experiments.cli.errors import BadRequest
from experiments.cli.flags import PROGRAM
from experiments.launch import remarks
from experiments.training import export, records
from experiments.training.components import check_files
from experiments.training.config import RunConfig
from experiments.training.loop import Outcome
from experiments.training.prepared import (
    ORIGIN,
    PreparedRun,
    prepare,
    record_config,
    train_and_record,
)
from experiments.training.process_group import ALONE, ProcessGroup, on_host
from experiments.training.records import Progress


def run_job(
    config: RunConfig,
    argv: list[str],
    started: float,
    asked_to_stop: Callable[[], int],
    group: ProcessGroup = ALONE,
) -> int:
    """Makes one run: header, training, files, summary.

    Args:
        config: from the command line.
        argv: its flags as given, for config.json.
        started: time.perf_counter() at the start of the process.
        asked_to_stop: looked at before each dispatch.
        group: the processes that train together; they have joined already.

    Returns:
        The exit code.

    Raises:
        BadRequest: what cannot be done; before anything is written, unless only a
            dispatch or an evaluation shows it.
    """
    run = prepare(config, group=group)
    out = config.out or records.default_out(config.task, config.algo)
    # The first process writes all files but checkpoints: it alone holds the folder.
    held = lock.held(out) if group.is_first else nullcontext()
    with held, Background() as background:
        _check_again(run, out)
        manager = CheckpointManager(run, out / FOLDER, started, background)
        manager, progress = manager.resumed()
        run = manager.run  # and lets go of the state it began with
        _open_files(run, argv, out, manager, progress)
        for text in remarks.header(run, config.batch_size is not None):
            terminal.say(text)

        with terminal.report(run.config.steps) as report:
            outcome, summary = train_and_record(
                run, out, report, asked_to_stop, manager.save, progress
            )
            background.wait()
        spent = progress.earlier_seconds + time.perf_counter() - started
        return exit_codes.decide(_finish(run, outcome, summary, out, spent))


def _check_again(run: PreparedRun, out: Path) -> None:
    """Raises a BadRequest if another command came first, before this one held `out`."""
    try:
        if run.group.is_first:
            check_files(run.config, out)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _open_files(
    run: PreparedRun,
    argv: list[str],
    out: Path,
    manager: CheckpointManager,
    progress: Progress,
) -> None:
    """Writes config.json, and removes old checkpoints; a BadRequest if it cannot."""
    try:
        if run.group.is_first:
            record_config(run, [*PROGRAM.split(), *argv], out, progress.lines)
        manager.open(progress.step)
    except OSError as error:
        raise BadRequest(f"--out {out}: {error.strerror}") from error


def _finish(
    run: PreparedRun, outcome: Outcome, summary: dict[str, Any], out: Path, spent: float
) -> int:
    """Writes the last files, and shows the summary; returns the exit code."""
    if run.config.export is not None and outcome.diverged_at is None:
        summary["export"] = _export(run, outcome, run.config.export)
    summary["total_seconds"] = round(spent, 3)
    is_written = True
    if run.group.is_first:
        try:
            records.finish(out, summary, outcome.progress.lines)
        except OSError as error:  # the summary is shown at least
            terminal.say(f"--out {out}: {error.strerror}: its files are not complete")
            is_written = False
        terminal.show_summary(summary, out)
    for text in remarks.after(run, outcome, summary["center_step"]):
        terminal.say(text)
    if not is_written:
        return exit_codes.FAILED
    if outcome.diverged_at is not None:
        return exit_codes.DIVERGED
    if outcome.stopped:
        return exit_codes.stopped_by(outcome.stopped)
    return exit_codes.DONE


def _export(run: PreparedRun, outcome: Outcome, path: Path) -> str | None:
    """Writes the center and how it was made; returns where, if it could."""
    # All processes take part.
    center = jax.tree.map(on_host, run.trainer.center(outcome.state))
    if not run.group.is_first:
        return None
    header = {name: records.plain(run.facts[name]) for name in ORIGIN}
    header |= {"steps": outcome.line["step"], "syncalgos": syncalgos.__version__}
    try:
        export.save(path, center, {name: json.dumps(x) for name, x in header.items()})
    except (OSError, SafetensorError) as error:  # the run's files are still to come
        terminal.say(f"--export {path}: {error}")
        return None
    return str(path)
