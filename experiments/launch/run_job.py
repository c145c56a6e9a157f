"""One run of the command line, from its config to its files."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.checkpoint import lock
from experiments.checkpoint.background import Background
from experiments.checkpoint.manager import FOLDER, Finished, Saver, restore
from experiments.cli import stopping, terminal
from experiments.cli.errors import BadRequest
from experiments.cli.flags import PROGRAM
from experiments.launch import remarks
from experiments.training import export, records
from experiments.training.config import RunConfig
from experiments.training.loop import Outcome, Save
from experiments.training.process_group import ALONE, ProcessGroup
from experiments.training.recording import (
    best,
    export_center,
    header,
    record_config,
    tracking,
    train_and_record,
)
from experiments.training.records import Line, Progress
from experiments.training.run import Run, check_files, prepare


def run_job(
    config: RunConfig,
    argv: list[str],
    started: float,
    asked_to_stop: Callable[[], int],
    group: ProcessGroup = ALONE,
) -> int:
    """Executes one run: header, training, files, summary.

    Args:
        config: the config of the command line.
        argv: the flags as given, for config.json.
        started: time.perf_counter() at the start of the process.
        asked_to_stop: returns the signal that asks for a stop, or 0; called before each
            dispatch.
        group: the processes that train together; they have joined already.

    Returns:
        The exit code.

    Raises:
        BadRequest: the run is not possible. No file is written before this error,
            unless it shows only in a dispatch or an evaluation.
    """
    run = prepare(config, group)
    out = config.out or records.default_out(config.task, config.algo)
    command = [*PROGRAM.split(), *argv]
    try:
        with in_folder(run, out, command, started) as (run, progress, save, wait):
            for text in remarks.header(run, config.batch_size is not None):
                terminal.say(text)
            tracked = tracking(run, progress, out)
            with terminal.report(run.config.steps) as report:
                outcome, summary = train_and_record(
                    run, out, report, asked_to_stop, save, progress, tracked.log
                )
                wait()
            missing = finish(run, outcome, summary, out, started)
            tracked.finish(summary)
            code = stopping.decide(_code(outcome, [*missing, *tracked.failed]))
            if group.is_first:
                terminal.show_summary(summary, out)
            after = remarks.after(run, outcome, summary["center_step"])
            for text in (*missing, *after):
                terminal.say(text)
            return code
    except Finished as error:
        terminal.say(str(error))
        return _shown(error.summary, run, out)


def _shown(found: dict[str, Any], run: Run, out: Path) -> int:
    """Shows the summary of a run that had finished before; returns the exit code."""
    if not run.group.is_first:
        return stopping.DONE
    terminal.show_summary(found, out)
    path, held = run.config.export, Path(found["export"] or "").absolute()
    if path and not (path.absolute() == held and path.exists()):
        terminal.say(f"no model was written to {path}: no checkpoint holds it")
        return stopping.FAILED
    return stopping.DIVERGED if found["diverged"] else stopping.DONE


@contextmanager
def in_folder(
    run: Run, out: Path, command: list[str], started: float
) -> Iterator[tuple[Run, Progress, Save, Callable[[], None]]]:
    """Locks a run's folder, restores the run if it is resumed, and opens its files.

    Yields the run, with the state of its newest checkpoint if it is resumed; its
    progress so far; a function that saves a checkpoint; and a function that waits until
    the last one is written.

    Args:
        run: a run that can start.
        out: the folder.
        command: the command that makes the run, for config.json.
        started: time.perf_counter() at the start of the process.

    Raises:
        BadRequest: another command holds the folder, or the run cannot continue.
    """
    # The first process writes all files but checkpoints: it alone locks the folder.
    held = lock.held(out) if run.group.is_first else nullcontext()
    with held, Background() as background:
        if run.group.is_first:  # another command may have written before the lock
            check_files(replace(run.config, out=out))
        saver, progress = restore(run, out / FOLDER, started, background)
        run = saver.run  # frees the initial state
        _open_files(saver, out, command, progress)
        yield run, progress, saver.save, background.wait


def _open_files(
    saver: Saver, out: Path, command: list[str], progress: Progress
) -> None:
    """Writes config.json, and removes old checkpoints; a BadRequest if it cannot."""
    try:
        record_config(saver.run, command, out, progress.lines)
        saver.open(progress.step, progress.lines)
    except OSError as error:
        raise BadRequest(f"--out {out}: {error.strerror}") from error


def finish(
    run: Run, outcome: Outcome, summary: dict[str, Any], out: Path, started: float
) -> list[str]:
    """Writes the last files of a run; returns a line for each output that is missing.

    Args:
        run: a run that has ended.
        outcome: its outcome.
        summary: its summary; the exported file and the seconds are added to it.
        out: the folder.
        started: time.perf_counter() at the start of the process.
    """
    missing = remarks.unsaved(run.config.checkpoints, outcome)
    if (path := run.config.export) is not None:
        why = _export(run, outcome, path)
        has_ended = outcome.diverged_at is not None or outcome.stopped
        if why and has_ended and _model(run, outcome) is None:
            terminal.say(why)  # as its code says: there was nothing to write
        elif why:
            missing.append(why)
        summary["export"] = None if why else str(path)
    spent = outcome.progress.earlier_seconds + time.perf_counter() - started
    summary["total_seconds"] = round(spent, 3)
    if run.group.is_first:
        try:
            records.finish(out, summary, outcome.progress.lines)
        except OSError as error:  # the summary is still shown
            missing.append(f"--out {out}: {error.strerror}: its files are incomplete")
    return missing


def _model(run: Run, outcome: Outcome) -> Line | None:
    """Returns the evaluation whose model is to be exported; None if there is none."""
    if run.config.keep == "best":
        return best(run, outcome.progress.lines)
    return outcome.line if outcome.diverged_at is None else None


def _export(run: Run, outcome: Outcome, path: Path) -> str:
    """Exports the model, if not done before; returns why it is not there, or ""."""
    if (line := _model(run, outcome)) is None:
        return f"no model was written to {path}"
    if run.config.keep == "last":
        return export_center(run, outcome.state, line["step"])
    # The file was written at that evaluation.
    if not run.group.is_first or export.facts(path) == header(run, line["step"]):
        return ""
    at = f"that of step {line['step']}"
    return f"--keep best: {path} does not hold the best model, {at}"


def _code(outcome: Outcome, missing: list[str]) -> int:
    """Returns the exit code of a run with these outputs missing."""
    if missing:
        return stopping.FAILED
    if outcome.diverged_at is not None:
        return stopping.DIVERGED
    if outcome.stopped:
        return stopping.stopped_by(outcome.stopped)
    return stopping.DONE
