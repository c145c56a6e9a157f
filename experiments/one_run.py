"""One run, from its config to its summary: the page to read first.

A run is prepared (prepare.py). Its folder is opened, and the run restored if it is
resumed. It is trained (loop.py), summed up, and its last files are written. The command
(`make`) and `experiments.train` take the same steps.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError

import syncalgos
from experiments.checkpoint import lock
from experiments.checkpoint.resume import FOLDER, Background, Finished, Saver, restore
from experiments.cli import stopping, terminal
from experiments.cli.errors import BadRequest
from experiments.cli.flags import PROGRAM
from experiments.cli.stopping import keeping_results
from experiments.tasks.task import Task
from experiments.training import export, files, progress, remarks, run_folder
from experiments.training.config import SETTINGS, RunConfig, Settings
from experiments.training.loop import Outcome, train
from experiments.training.measurements import memory, sends
from experiments.training.prepare import ORIGIN, Run, check_files, prepare
from experiments.training.process_group import ALONE, ProcessGroup, on_host
from experiments.training.progress import Line, Progress
from experiments.training.trackers import Tracked, Tracker, Tracking
from syncalgos import Replica, Strategy, TrainState
from syncalgos.combinators import introspection


def make(
    config: RunConfig,
    argv: Sequence[str],
    started: float,
    asked_to_stop: Callable[[], int],
    group: ProcessGroup = ALONE,
) -> int:
    """Makes the run of a command line: header, training, files, summary.

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
    out = config.out or run_folder.default_out(config.task, config.algo)
    try:
        with opened(run, out, [*PROGRAM.split(), *argv], started) as folder:
            run = folder.run  # frees the initial state
            for text in remarks.header(run, config.batch_size is not None):
                terminal.say(text)
            tracked = folder.tracking()
            with terminal.report(run.config.steps) as report:
                outcome, summary = trained(folder, report, asked_to_stop, tracked.log)
            missing = folder.finish(outcome, summary)
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


def _code(outcome: Outcome, missing: list[str]) -> int:
    """Returns the exit code of a run with these outputs missing."""
    if missing:
        return stopping.FAILED
    if outcome.diverged_at is not None:
        return stopping.DIVERGED
    if outcome.stopped:
        return stopping.stopped_by(outcome.stopped)
    return stopping.DONE


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
def opened(
    run: Run, out: Path | None, command: Sequence[str], started: float
) -> Iterator["Folder"]:
    """Locks a run's folder, restores the run if it is resumed, and opens its files.

    Args:
        run: a run that can start.
        out: the folder; None writes nothing.
        command: the command that makes the run, for config.json.
        started: time.perf_counter() at the start of the process.

    Raises:
        BadRequest: another command holds the folder, or the run cannot continue.
    """
    if out is None:
        yield Folder(run, None, started)
        return
    # The first process writes all files but checkpoints: it alone locks the folder.
    held = lock.held(out) if run.group.is_first else nullcontext()
    with held, Background() as background:
        if run.group.is_first:  # another command may have written before the lock
            check_files(replace(run.config, out=out))
        saver, done = restore(run, out / FOLDER, started, background)
        run = saver.run  # frees the initial state
        folder = Folder(run, out, started, done, saver)
        try:
            folder.record(command)
            saver.open(done.step, done.lines)
        except OSError as error:
            raise BadRequest(f"--out {out}: {error.strerror}") from error
        yield folder


class Folder:
    """The folder of a run, which may write nothing; it is what the loop watches.

    Args:
        run: the run, with the state that it starts from.
        path: the folder; None writes nothing.
        started: time.perf_counter() at the start of the process.
        done: the progress of a resumed run.
        saver: saves checkpoints; None saves none.
    """

    def __init__(
        self,
        run: Run,
        path: Path | None,
        started: float,
        done: Progress | None = None,
        saver: Saver | None = None,
    ):
        self.run, self.path, self.progress = run, path, done or Progress()
        self._started, self._saver = started, saver
        self._metrics = path and run_folder.Metrics(path, run.group.note)

    def record(self, command: Sequence[str]) -> None:
        """Writes config.json and the lines so far; removes an earlier run's files.

        Only the first process writes.

        Raises:
            OSError: it cannot be written.
        """
        run, out = self.run, self.path
        if out is None or not run.group.is_first:
            return
        config = {
            **run.facts,
            "command": command,
            "settings": {name: getattr(run.config, name) for name in SETTINGS},
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / "summary.json").unlink(missing_ok=True)
        files.write_json(out / "config.json", config)
        run_folder.write_metrics(out, self.progress.lines)

    def tracking(self, own: Iterable[Tracker] = ()) -> Tracking:
        """Starts the trackers of the run, which follow the first process."""
        run, c = self.run, self.run.config
        found = Tracking(c.track, own) if run.group.is_first else Tracking(())
        settings = {name: getattr(c, name) for name in SETTINGS}
        name = self.path.absolute().name if self.path else f"{c.task}-{c.algo}"
        found.start(
            Tracked(
                name=name,
                id=self.progress.run_id or secrets.token_hex(16),
                config={**run.facts, **settings, **c.arguments, **c.task_arguments},
                folder=self.path,
                lines=self.progress.lines,
            )
        )
        return found

    def add(self, state: TrainState) -> None:
        """Writes the last evaluation, and exports its model if it is the best."""
        run, lines = self.run, self.progress.lines
        if self._metrics is not None and run.group.is_first:
            self._metrics.add(lines)
        is_kept = run.config.export and run.config.keep == "best"
        is_best = is_kept and best(run, lines) is lines[-1]
        if is_best and (why := export_center(run, state, lines[-1]["step"])):
            terminal.say(why)

    def save(self, state: TrainState, last: bool) -> None:
        """Saves a checkpoint; `last` if it is that of the run's end."""
        if self._saver is not None:
            self._saver.save(state, self.progress, last)

    def wait(self) -> None:
        """Waits until the last checkpoint is written."""
        if self._saver is not None:
            self._saver.background.wait()

    def finish(self, outcome: Outcome, summary: dict[str, Any]) -> list[str]:
        """Writes the last files; returns a line for each output that is missing.

        Args:
            outcome: the outcome of the run.
            summary: its summary; the exported file and the seconds are added to it.
        """
        run, out, path = self.run, self.path, self.run.config.export
        if out is None:
            return []
        missing = remarks.unsaved(run.config.checkpoints, outcome)
        if path is not None:
            why = _export(run, outcome, path)
            has_ended = outcome.diverged_at is not None or outcome.stopped
            if why and has_ended and _model(run, outcome) is None:
                terminal.say(why)  # as its code says: there was nothing to write
            elif why:
                missing.append(why)
            summary["export"] = None if why else str(path)
        try:
            self.close(summary)
        except OSError as error:  # the summary is still shown
            missing.append(f"--out {out}: {error.strerror}: its files are incomplete")
        return missing

    def close(self, summary: dict[str, Any]) -> None:
        """Writes the summary, to which the seconds are added, in the first process.

        Raises:
            OSError: a file cannot be written.
        """
        spent = self.progress.earlier_seconds + time.perf_counter() - self._started
        summary["total_seconds"] = round(spent, 3)
        if self.path is not None and self.run.group.is_first:
            run_folder.finish(self.path, summary, self.progress.lines)


class Watch:
    """Follows a run's training: shows it, writes it, and says when to stop.

    Args:
        folder: the folder of the run.
        report: the display of the progress.
        asked_to_stop: called before each dispatch.
        on_evaluation: called with each line of metrics.jsonl, in the first process.
        has_trained: called after each dispatch, when there is something to save.
    """

    def __init__(
        self,
        folder: Folder,
        report: terminal.Report,
        asked_to_stop: Callable[[], int],
        on_evaluation: Callable[[Line], None] | None,
        has_trained: Callable[[], None],
    ):
        self.asked_to_stop, self.save = asked_to_stop, folder.save
        self._folder, self._report = folder, report
        self._on_evaluation, self._has_trained = on_evaluation, has_trained

    def stepped(self) -> None:
        """Shows the steps of a dispatch."""
        self._has_trained()
        done = self._folder.progress
        self._report.step(done.step, done.losses[-1])

    def evaluated(self, state: TrainState) -> None:
        """Shows and writes the last evaluation."""
        c, line = self._folder.run.config, self._folder.progress.lines[-1]
        self._report.line(terminal.evaluation_line(line, c.steps, c.lr, c.validation))
        self._folder.add(state)
        if self._on_evaluation is not None and self._folder.run.group.is_first:
            self._on_evaluation(line)


def trained(
    folder: Folder,
    report: terminal.Report,
    asked_to_stop: Callable[[], int],
    on_evaluation: Callable[[Line], None] | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """Trains the run of a folder, and writes metrics.jsonl and checkpoints.

    Args:
        folder: the folder of the run, whose state cannot be used afterwards.
        report: the display of the progress.
        asked_to_stop: called before each dispatch.
        on_evaluation: called with each line of metrics.jsonl, in the first process.

    Returns:
        The outcome, and the summary, which is not written yet.
    """
    with keeping_results() as has_trained:
        watch = Watch(folder, report, asked_to_stop, on_evaluation, has_trained)
        outcome = train(folder.run, folder.progress, watch)
    folder.wait()
    return outcome, summary_of(folder.run, outcome)


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


def export_center(run: Run, state: TrainState, step: int) -> str:
    """Writes the center and its origin to a file; returns why it could not, or ""."""
    # All processes take part.
    center = jax.tree.map(on_host, run.trainer.center(state))
    path = run.config.export
    if path is None or not run.group.is_first:
        return ""
    try:
        export.save(path, center, header(run, step))
    except (OSError, SafetensorError) as error:  # the run's files must still be written
        return f"--export {path}: {getattr(error, 'strerror', None) or error}"
    return ""


def header(run: Run, step: int) -> dict[str, str]:
    """Returns the header of an exported model: its run, and the step."""
    found = {name: files.plain(run.facts[name]) for name in ORIGIN}
    found |= {"steps": step, "syncalgos": syncalgos.__version__}
    return {name: json.dumps(x) for name, x in found.items()}


def best(run: Run, lines: Iterable[Line]) -> Line | None:
    """Returns the best of the planned evaluations, which exclude that of a stop."""
    planned = {*run.config.evaluations}
    return progress.best(line for line in lines if line["step"] in planned)


def summary_of(run: Run, outcome: Outcome) -> dict[str, Any]:
    """Returns summary.json, without the fields that its writer adds."""
    progress, line = outcome.progress, outcome.line
    sent = run.rounds.sent(progress)
    steps, seconds, total = line["step"], progress.seconds, line["bytes_per_worker"]
    sha256 = params_sha256(run.trainer.center(outcome.state))
    decided = introspection.has(run.plan.method.strategy, "decided")
    moving = np.diff(sent.per_step[:steps], prepend=0.0) > 0 if sent else None
    # For modelling their time.
    shown = {} if sent is None else sends.to_json(sends.sends(sent))
    delay = delay_of_sends(run.config, run.task, run.plan.method.algorithm)
    return {
        **run.facts,
        **{name: line[name] for name in line if name != "step"},
        "steps": steps,
        "syncs": None if moving is None else int(moving.sum()),
        "decided": len({step for step, _ in progress.decided}) if decided else None,
        "steps_per_second": steps / seconds if seconds else 0.0,
        "params_sha256": sha256,
        "temp_bytes": run.trainer.temp_bytes,
        "device_bytes": memory.device_bytes(outcome.state),
        "device_bytes_without_mesh": memory.bytes_without_mesh(outcome.state),
        "bytes_per_device": sends.each_device(total, run.config.worker_devices),
        "lane_form": progress.lane_form,
        "not_counted": run.task.sends or None,
        "sends": {**shown, "delay": delay} if shown else None,
        "center_step": run.rounds.center_step(steps),
        "export": None,
        "diverged": outcome.diverged_at is not None,
        "diverged_at": outcome.diverged_at,
        "not_finite_workers": outcome.not_finite,
        "stopped": bool(outcome.stopped),
        "resumed_at": progress.resumed_at,
    }


def delay_of_sends(config: Settings, task: Task, algorithm: Strategy) -> int:
    """Returns how many local steps a message may take; 0 if the run waits for it."""
    # An average of the optimizer's state, and shared tables, are used at once.
    waits = config.opt_state_at_sync == "average" or task.kept == "shared"
    return 0 if waits else algorithm.late


def params_sha256(replica: Replica) -> str:
    """Returns the SHA-256 of the params' leaves in order."""
    # The same command gives the same hash: tests use it to show unchanged numbers.
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(replica.params):
        digest.update(on_host(leaf).tobytes())
    return digest.hexdigest()
