"""One run, from its config to its summary: the page to read first.

    plan, data = checked(config)     task, strategy, optimizer, engine; then the data
    run = make_run(plan, data)       the model, the first state and the rounds
    outcome = train(run, …)          the loop
    summary = summarize(run, outcome)

The task, the strategy and the inner optimizer follow from the config, and the engine
from these (`training/plan.py`); the data come after all checks (`training/prepare.py`).
A folder is opened around the loop, and the run restored if it is resumed. The command
(`make`) and `experiments.train` take the same steps; a study makes a plan and a run
itself, so that runs share programs.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import files
from experiments.checkpoint import lock
from experiments.checkpoint.resume import FOLDER, Background, Finished, Saver, restore
from experiments.command import stopping, terminal
from experiments.command.flags import PROGRAM
from experiments.command.stopping import keeping_results
from experiments.training import remarks, run_folder
from experiments.training.config import SETTINGS, RunConfig
from experiments.training.export import Export
from experiments.training.loop import Outcome, Watch, train
from experiments.training.prepare import Run, check_files, make_run, prepare_plan
from experiments.training.process_group import ALONE, ProcessGroup
from experiments.training.progress import Progress
from experiments.training.summary import Summary, summarize
from experiments.training.summary_text import describe_evaluation, show_summary
from experiments.training.trackers import Tracked, Tracker, Tracking
from syncalgos import Replica, TrainState


def make_run_of_command(
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
    plan, data = prepare_plan(config, group=group)
    run = make_run(plan, data, group)
    out = config.out or run_folder.default_out(config.task, config.algo)
    try:
        with open_run(run, out, [*PROGRAM.split(), *argv], started) as folder:
            run = folder.run  # frees the initial state
            for text in remarks.header(run, config.batch_size is not None):
                terminal.say(text)
            tracked = folder.track()
            with terminal.open_report(run.config.steps) as report:
                outcome = folder.train(report, asked_to_stop)
            summary, missing = folder.finish(outcome, summarize(run, outcome))
            tracked.finish(summary.to_json())
            is_whole = not missing and not tracked.failed
            code = stopping.decide(_code(outcome) if is_whole else stopping.FAILED)
            if group.is_first:
                show_summary(summary, out)
            caution_lines = remarks.cautions(run, outcome, summary.center_step)
            for text in (*missing, *caution_lines):
                terminal.say(text)
            return code
    except Finished as error:
        terminal.say(str(error))
        return _show_finished(Summary.from_json(error.summary), run, out)


def _code(outcome: Outcome) -> int:
    """Returns the exit code of a run whose outputs are all there."""
    if outcome.diverged:
        return stopping.DIVERGED
    if outcome.stopped:
        return stopping.stop_code(outcome.stopped)
    return stopping.COMPLETED


def _show_finished(summary: Summary, run: Run, out: Path) -> int:
    """Shows the summary of a run that had finished before; returns the exit code."""
    if not run.group.is_first:
        return stopping.COMPLETED
    show_summary(summary, out)
    path = run.config.export
    earlier_path = Path(summary.export or "").absolute()
    if path and not (path.absolute() == earlier_path and path.exists()):
        terminal.say(f"no model was written to {path}: no checkpoint holds it")
        return stopping.FAILED
    return stopping.DIVERGED if summary.diverged else stopping.COMPLETED


@contextmanager
def open_run(
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
    folder_lock = lock.lock_folder(out) if run.group.is_first else nullcontext()
    with folder_lock, Background() as background:
        if run.group.is_first:  # another command may have written before the lock
            check_files(replace(run.config, out=out))
        saver = restore(run, out / FOLDER, background)
        run = saver.run  # frees the initial state
        folder = Folder(run, out, started, saver)
        with files.refuse_os_errors("--out", out):
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
        self.run = run
        self.path = path
        self.saver = saver
        self._started = started
        self.progress = saver.progress if saver else Progress()
        self.tracked = Tracking(())
        # Only the first process writes.
        self._written_path = path if run.group.is_first else None
        self._metrics = self._written_path and run_folder.Metrics(
            self._written_path, run.group.note
        )
        self._export = Export(
            path=run.config.export,
            keep=run.config.keep,
            planned_steps=run.config.evaluations,
            origin=run.origin,
            is_first=run.group.is_first,
        )

    @property
    def seconds(self) -> float:
        """The total time of the run until now."""
        return self.progress.earlier_seconds + time.perf_counter() - self._started

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [evaluation.to_json() for evaluation in self.progress.evaluations]

    def record(self, command: Sequence[str]) -> None:
        """Writes config.json and the lines so far; removes an earlier run's files.

        Raises:
            OSError: it cannot be written.
        """
        run = self.run
        out = self._written_path
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
        run_folder.write_metrics(out, self.lines)

    def track(self, trackers: Iterable[Tracker] = ()) -> Tracking:
        """Starts the trackers of the run, which follow the first process."""
        run = self.run
        c = self.run.config
        if run.group.is_first:
            self.tracked = Tracking(c.track, trackers)
        settings = {name: getattr(c, name) for name in SETTINGS}
        self.tracked.start(
            Tracked(
                name=self.path.absolute().name if self.path else f"{c.task}-{c.algo}",
                id=self.progress.run_id or secrets.token_hex(16),
                config={**run.facts, **settings, **c.arguments, **c.task_arguments},
                folder=self.path,
                lines=self.lines,
            )
        )
        return self.tracked

    def train(
        self,
        report: terminal.ProgressDisplay,
        asked_to_stop: Callable[[], int],
        on_evaluation: Callable[[dict[str, Any]], None] | None = None,
        *,
        evaluate_at_end_only: bool = False,
    ) -> Outcome:
        """Trains the run, and writes metrics.jsonl and checkpoints.

        Args:
            report: the display of the progress.
            asked_to_stop: called before each dispatch.
            on_evaluation: called with each line of metrics.jsonl, in the first process.
            evaluate_at_end_only: as for `loop.train`.

        Returns:
            The outcome. The state of the run cannot be used afterwards.
        """
        run = self.run
        progress = self.progress
        c = self.run.config

        def stepped() -> None:
            has_trained()
            report.step(progress.step, progress.losses[-1])

        def evaluated(center: Replica) -> None:
            evaluation = progress.evaluations[-1]
            report.line(describe_evaluation(evaluation, c.steps, c.lr, c.validation))
            self.add(center)
            if on_evaluation is not None and run.group.is_first:
                on_evaluation(evaluation.to_json())

        with keeping_results() as has_trained:
            watch = Watch(asked_to_stop, stepped, evaluated, self.save)
            outcome = train(
                run, progress, watch, evaluate_at_end_only=evaluate_at_end_only
            )
        if self.saver is not None:
            self.saver.background.wait()
        return outcome

    def add(self, center: Replica) -> None:
        """Records the last evaluation, and exports its model if it is the best."""
        evaluations = self.progress.evaluations
        if self._metrics is not None:
            self._metrics.add(evaluations)
        why = self._export.add(center, evaluations)
        if why:
            terminal.say(why)
        self.tracked.log(evaluations[-1].to_json())

    def save(self, state: TrainState, is_last: bool) -> None:
        """Saves a checkpoint.

        Args:
            state: the state of the engine.
            is_last: whether it is that of the run's end.
        """
        if self.saver is not None:
            self.saver.save(state, self.seconds, is_last)

    def finish(self, outcome: Outcome, summary: Summary) -> tuple[Summary, list[str]]:
        """Writes the last files.

        Args:
            outcome: the outcome of the run.
            summary: its summary.

        Returns:
            The summary with the exported file and the seconds, and a line for each
            output that is missing.
        """
        run = self.run
        out = self.path
        path = self.run.config.export
        if out is None:
            return summary, []
        missing = remarks.remark_unsaved(run.config.checkpoints, outcome)
        if path is not None:
            has_diverged = outcome.diverged_at is not None
            evaluation = self._export.find_evaluation(
                outcome.progress.evaluations, has_diverged=has_diverged
            )
            why = self._export.finish(outcome.center, evaluation)
            if why and evaluation is None and (summary.diverged or summary.stopped):
                terminal.say(why)  # as its code says: there was nothing to write
            elif why:
                missing.append(why)
            summary = replace(summary, export=None if why else str(path))
        summary = replace(summary, total_seconds=round(self.seconds, 3))
        try:
            self.write(summary)
        except OSError as error:  # the summary is still shown
            missing.append(f"--out {out}: {error.strerror}: its files are incomplete")
        return summary, missing

    def write(self, summary: Summary) -> None:
        """Writes the summary, and the missing lines of metrics.jsonl.

        Raises:
            OSError: a file cannot be written.
        """
        if self._written_path is not None:
            run_folder.finish(self._written_path, summary.to_json(), self.lines)
