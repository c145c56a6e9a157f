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
from experiments import files
from experiments.checkpoint import lock
from experiments.checkpoint.resume import FOLDER, Background, Finished, Saver, restore
from experiments.command import stopping, terminal
from experiments.command.flags import PROGRAM
from experiments.command.stopping import keeping_results
from experiments.tasks.task import Task
from experiments.training import export, progress, remarks, run_folder, sends
from experiments.training.config import SETTINGS, RunConfig, Settings
from experiments.training.loop import Outcome, Watch, train
from experiments.training.prepare import ORIGIN, Run, check_files, prepare
from experiments.training.process_group import ALONE, ProcessGroup, on_host
from experiments.training.progress import Line, Progress
from experiments.training.trackers import Tracked, Tracker, Tracking
from syncalgos import Replica, Strategy, TrainState, network


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
            tracked = folder.track()
            with terminal.report(run.config.steps) as report:
                outcome, summary = trained(folder, report, asked_to_stop)
            missing = folder.finish(outcome, summary)
            tracked.finish(summary)
            is_whole = not missing and not tracked.failed
            code = stopping.decide(_code(outcome) if is_whole else stopping.FAILED)
            if group.is_first:
                terminal.show_summary(summary, out)
            after = remarks.after(run, outcome, summary["center_step"])
            for text in (*missing, *after):
                terminal.say(text)
            return code
    except Finished as error:
        terminal.say(str(error))
        return _shown(error.summary, run, out)


def _code(outcome: Outcome) -> int:
    """Returns the exit code of a run whose outputs are all there."""
    if outcome.diverged:
        return stopping.DIVERGED
    return stopping.stopped_by(outcome.stopped) if outcome.stopped else stopping.DONE


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
    held = lock.lock_folder(out) if run.group.is_first else nullcontext()
    with held, Background() as background:
        if run.group.is_first:  # another command may have written before the lock
            check_files(replace(run.config, out=out))
        saver = restore(run, out / FOLDER, background)
        run = saver.run  # frees the initial state
        folder = Folder(run, out, started, saver)
        with files.needed("--out", out):
            folder.record(command)
            saver.open()
        yield folder


class Folder:
    """The folder of a run, which may write nothing.

    Args:
        run: the run, with the state that it starts from.
        path: the folder; None writes nothing.
        started: time.perf_counter() at the start of the process.
        saver: saves checkpoints, and has the progress of a resumed run; None saves
            none.

    Attributes:
        tracked: the trackers of the run.
    """

    def __init__(
        self, run: Run, path: Path | None, started: float, saver: Saver | None = None
    ):
        self.run, self.path, self.saver, self._started = run, path, saver, started
        self.progress = saver.progress if saver else Progress()
        self.tracked = Tracking(())
        # Only the first process writes.
        self._own = path if run.group.is_first else None
        self._metrics = self._own and run_folder.Metrics(self._own, run.group.note)

    @property
    def seconds(self) -> float:
        """The total time of the run until now."""
        return self.progress.earlier_seconds + time.perf_counter() - self._started

    def record(self, command: Sequence[str]) -> None:
        """Writes config.json and the lines so far; removes an earlier run's files.

        Raises:
            OSError: it cannot be written.
        """
        run, out = self.run, self._own
        if out is None:
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

    def track(self, own: Iterable[Tracker] = ()) -> Tracking:
        """Starts the trackers of the run, which follow the first process."""
        run, c = self.run, self.run.config
        if run.group.is_first:
            self.tracked = Tracking(c.track, own)
        settings = {name: getattr(c, name) for name in SETTINGS}
        self.tracked.start(
            Tracked(
                name=self.path.absolute().name if self.path else f"{c.task}-{c.algo}",
                id=self.progress.run_id or secrets.token_hex(16),
                config={**run.facts, **settings, **c.arguments, **c.task_arguments},
                folder=self.path,
                lines=self.progress.lines,
            )
        )
        return self.tracked

    def add(self, center: Replica) -> None:
        """Records the last evaluation, and exports its model if it is the best."""
        run, lines = self.run, self.progress.lines
        if self._metrics is not None:
            self._metrics.add(lines)
        if why := _export_if_best(run, center, lines):
            terminal.say(why)
        self.tracked.log(lines[-1])

    def save(self, state: TrainState, last: bool) -> None:
        """Saves a checkpoint; `last` if it is that of the run's end."""
        if self.saver is not None:
            self.saver.save(state, self.seconds, last)

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
            line = _last_model(run, outcome)
            why = _export_last(run, outcome.center, line)
            if why and line is None and (summary["diverged"] or summary["stopped"]):
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
        """Writes the summary, to which the seconds are added.

        Raises:
            OSError: a file cannot be written.
        """
        summary["total_seconds"] = round(self.seconds, 3)
        if self._own is not None:
            run_folder.finish(self._own, summary, self.progress.lines)


def trained(
    folder: Folder,
    report: terminal.Report,
    asked_to_stop: Callable[[], int],
    on_evaluation: Callable[[Line], None] | None = None,
    *,
    evaluate_at_end_only: bool = False,
) -> tuple[Outcome, dict[str, Any]]:
    """Trains the run of a folder, and writes metrics.jsonl and checkpoints.

    Args:
        folder: the folder of the run, whose state cannot be used afterwards.
        report: the display of the progress.
        asked_to_stop: called before each dispatch.
        on_evaluation: called with each line of metrics.jsonl, in the first process.
        evaluate_at_end_only: as for `loop.train`.

    Returns:
        The outcome, and the summary, which is not written yet.
    """
    run, progress, c = folder.run, folder.progress, folder.run.config

    def stepped() -> None:
        has_trained()
        report.step(progress.step, progress.losses[-1])

    def evaluated(center: Replica) -> None:
        line = progress.lines[-1]
        report.line(terminal.evaluation_line(line, c.steps, c.lr, c.validation))
        folder.add(center)
        if on_evaluation is not None and run.group.is_first:
            on_evaluation(line)

    with keeping_results() as has_trained:
        watch = Watch(asked_to_stop, stepped, evaluated, folder.save)
        outcome = train(run, progress, watch, evaluate_at_end_only=evaluate_at_end_only)
    if folder.saver is not None:
        folder.saver.background.wait()
    return outcome, summary_of(run, outcome)


def _export_if_best(run: Run, center: Replica, lines: Sequence[Line]) -> str:
    """Exports the model of the last evaluation if --keep best asks for it.

    Returns:
        The reason why the model could not be written, or "".
    """
    is_kept = run.config.export and run.config.keep == "best"
    is_best = is_kept and _best(run, lines) is lines[-1]
    return _export(run, center, lines[-1]["step"]) if is_best else ""


def _last_model(run: Run, outcome: Outcome) -> Line | None:
    """Returns the evaluation whose model is to be exported; None if there is none."""
    if run.config.keep == "best":
        return _best(run, outcome.progress.lines)
    return outcome.line if outcome.diverged_at is None else None


def _export_last(run: Run, center: Replica, line: Line | None) -> str:
    """Exports the model of `_last_model`, if not done before.

    Returns:
        The reason why the model is not in its file, or "".
    """
    path = run.config.export
    if line is None or path is None:
        return f"no model was written to {path}"
    if run.config.keep == "last":
        return _export(run, center, line["step"])
    # The file was written at that evaluation.
    if not run.group.is_first or export.facts(path) == _origin(run, line["step"]):
        return ""
    return (
        f"--keep best: {path} does not hold the best model, that of step {line['step']}"
    )


def _best(run: Run, lines: Sequence[Line]) -> Line | None:
    """Returns the best evaluation, but for the last one if a stop caused it."""
    # Of a run that is resumed with other --steps, earlier ones may not be planned.
    planned = lines[-1]["step"] in run.config.evaluations
    return progress.best(lines if planned else lines[:-1])


def _export(run: Run, center: Replica, step: int) -> str:
    """Writes the center and its origin to a file; returns why it could not, or ""."""
    center = jax.tree.map(on_host, center)  # all processes take part
    path = run.config.export
    if path is None or not run.group.is_first:
        return ""
    try:
        export.save(path, center, _origin(run, step))
    except (OSError, SafetensorError) as error:  # the run's files must still be written
        return f"--export {path}: {getattr(error, 'strerror', None) or error}"
    return ""


def _origin(run: Run, step: int) -> dict[str, str]:
    """Returns the header of an exported model: its run, and the step."""
    found = {name: files.plain(run.facts[name]) for name in ORIGIN}
    found |= {"steps": step, "syncalgos": syncalgos.__version__}
    found |= run.data.preparation
    return {name: json.dumps(x) for name, x in found.items()}


def summary_of(run: Run, outcome: Outcome) -> dict[str, Any]:
    """Returns summary.json, without the fields that its writer adds."""
    progress, line, method = outcome.progress, outcome.line, run.plan.method
    steps, seconds = line["step"], progress.seconds
    syncs = moved = decided = None
    # Syncs of other workers, before --resume-center, are in the bytes alone.
    sent = None if progress.sent_since else run.rounds.sent(progress)
    if sent is not None:
        syncs = int((np.diff(sent.per_step[:steps], prepend=0.0) > 0).sum())
        delay = delay_of_sends(run.config, run.task, method.algorithm)
        moved = {**sends.to_json(network.sends(sent)), "delay": delay}
    if not progress.sent_since and syncalgos.describe(method.strategy).decides:
        decided = len({step for step, _ in progress.decided})
    devices = run.config.worker_devices
    return {
        **run.facts,
        **{name: line[name] for name in line if name != "step"},
        "steps": steps,
        "syncs": syncs,
        "decided": decided,
        "steps_per_second": steps / seconds if seconds else 0.0,
        "params_sha256": params_sha256(outcome.center),
        "temp_bytes": run.trainer.temp_bytes,
        "device_bytes": sends.device_bytes(outcome.state),
        "device_bytes_without_mesh": sends.device_bytes(outcome.state, in_mesh=False),
        "bytes_per_device": sends.each_device(line["bytes_per_worker"], devices),
        "lane_form": progress.lane_form,
        "not_counted": run.task.sends or None,
        "sends": moved,  # for modelling their time
        "center_step": run.rounds.center_step(steps),
        "export": None,
        "diverged": outcome.diverged,
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
