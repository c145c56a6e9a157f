"""The runs of a study: which is made next, how one is made, and their progress."""

import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from rich.progress import Progress, TaskID

from experiments import files
from experiments.checkpoint import lock
from experiments.command import stopping, terminal
from experiments.command.errors import BadRequest, in_one_line
from experiments.one_run import Folder
from experiments.study.runs import (
    Loader,
    RunSet,
    damage,
    is_done,
    join_trials,
    list_command,
)
from experiments.training import run_folder
from experiments.training.config import RunConfig
from experiments.training.loop import correct
from experiments.training.objects import NO_OBJECTS, Objects
from experiments.training.plan import Programs
from experiments.training.prepare import make_run
from experiments.training.summary import Summary, summarize

PAUSE = 0.1  # seconds between two reports of a step
CHECKPOINTS = "checkpoints"  # the folder in that of a run
# The files that a run writes; others are never removed.
_NAMES = "|".join(map(re.escape, run_folder.NAMES))
OF_RUN = re.compile(
    rf"{_NAMES}|\.(?:{_NAMES}){files.UNFINISHED}|{CHECKPOINTS}/"
    rf"(?:step-\d+\.\d+-of-\d+\.npz|\.\d+-of-\d+{files.UNFINISHED})"
)


# News about a run in progress: the local steps done, of how many, and the loss of the
# last one; or a warning.
News = tuple[int, int, float] | str


class StopRequested(Exception):
    """The user asked to stop; the current run is discarded."""


class FinishedRun(NamedTuple):
    """The run is complete; the words are its results."""

    words: str


class Refused(NamedTuple):
    """The run could not be made.

    Attributes:
        line: the reason, in one line.
        is_request: whether its flags were refused.
    """

    line: str
    is_request: bool = False


class Missing(NamedTuple):
    """A missing run.

    Attributes:
        number: the index of the run set to report. Its runs and trials differ only in
            numbers and seeds, and mostly share their programs.
        runs: the run set that the run belongs to.
        seed: the seed of the run.
    """

    number: int
    runs: RunSet
    seed: int

    @property
    def set_name(self) -> str:
        """The name of all seeds, for the user."""
        names = [self.runs.variant.label, self.runs.point]
        if self.runs.is_trial:
            names.append(self.runs.trial)
        return " ".join(filter(None, names))

    @property
    def name(self) -> str:
        """The name of the run, for the user."""
        return f"{self.set_name}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self.runs.seed_folder(self.seed)

    @property
    def config(self) -> RunConfig:
        """Its config."""
        return self.runs.make_config(self.seed)


class StudyQueue:
    """The missing runs, handed out to jobs, and their outcomes.

    Final runs wait only for the trials of their own variant.

    Args:
        planned: the run sets to report, with their first trials.
        choose: function that chooses the values of a run set whose trials are done.
        further: function that yields more trials of a run set, each time once all
            earlier ones are done.

    Attributes:
        planned: the run sets to report, with all their trials so far.
        total: the number of all runs.
        num_done: the number of runs that exist.
        failures: the runs that failed, and why.
        reported: the run sets to report, with the chosen values; None while trials run.
        waiting: the missing runs that are known so far and that no job makes.
    """

    def __init__(
        self,
        planned: Sequence[RunSet],
        choose: Callable[[RunSet], RunSet | None],
        further: Callable[[RunSet], Iterator[list[RunSet]]] = lambda runs: iter(()),
    ):
        self.planned = [*planned]
        self._choose = choose
        self._further = [further(runs) for runs in planned]
        self.total = 0
        for runs in planned:
            self.total += sum(len(x.seeds) for x in (runs, *runs.trials))
        self.num_done = 0
        self.failures = list[tuple[Missing, Refused]]()
        self.reported: list[RunSet | None] = [None] * len(planned)
        self.waiting = list[Missing]()
        self._runs_in_progress = Counter[int]()  # by number
        self._missing_trials = Counter[int]()  # by number
        # All trials first: the final runs then fill the gaps at the end.
        for number, runs in enumerate(planned):
            self._missing_trials[number] = self._add(
                number, runs.trials, len(self.waiting)
            )
        for number in range(len(planned)):
            if not self._missing_trials[number]:
                self._go_on(number, len(self.waiting))

    @property
    def missing(self) -> int:
        """The number of runs that do not exist yet."""
        return self.total - self.num_done

    @property
    def is_over(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.waiting and not self._runs_in_progress.total()

    def take(self, last_number: int | None = None) -> Missing | None:
        """Returns the run that a free job makes next; None while there is none.

        Args:
            last_number: the number of the job's last run.
        """
        if not self.waiting:
            return None
        # Programs are compiled by as few jobs as possible: a job stays with its number,
        # or begins one that no other job has.
        run = min(
            self.waiting,
            key=lambda x: (x.number != last_number, self._runs_in_progress[x.number]),
        )
        self.waiting.remove(run)
        self._runs_in_progress[run.number] += 1
        return run

    def count(self, run: Missing, outcome: FinishedRun | Refused) -> None:
        """Counts a run, which was made or failed."""
        self._runs_in_progress[run.number] -= 1
        if isinstance(outcome, FinishedRun):
            self.num_done += 1
        else:
            self.failures.append((run, outcome))
        self._missing_trials[run.number] -= 1
        if self._missing_trials[run.number] == 0:  # final runs count on, below it
            # First of all that wait: their variant has been under way the longest.
            self._go_on(run.number, 0)

    def give_back(self, run: Missing) -> None:
        """Takes back a run that a job has not made."""
        self._runs_in_progress[run.number] -= 1
        self.waiting.insert(0, run)

    def _go_on(self, number: int, place: int) -> None:
        """Adds further trials, or, without any, the runs with the chosen values."""
        planned = self.planned[number]
        for trials in self._further[number]:
            planned = planned._replace(trials=join_trials(planned.trials, trials))
            self.planned[number] = planned
            self.total += sum(len(x.seeds) for x in trials)
            self._missing_trials[number] = self._add(number, trials, place)
            if self._missing_trials[number]:
                return
        runs = self._choose(planned)
        self.reported[number] = runs
        if runs is not None:
            self._add(number, [runs], place)
            return
        refusal = Refused(
            "all of its trials failed, so no values can be chosen", is_request=True
        )
        self.failures.append((Missing(number, planned, planned.seeds[0]), refusal))

    def _add(self, number: int, sets: Sequence[RunSet], place: int) -> int:
        """Adds the missing runs of some run sets; returns how many there are."""
        missing: list[Missing] = []
        for runs in sets:
            missing += [Missing(number, runs, seed) for seed in runs.missing()]
            self.num_done += len(runs.seeds)
        self.num_done -= len(missing)
        for run in missing:
            damage_text = damage(run.folder)
            if damage_text:
                terminal.say(f"{damage_text}: the run is repeated")
        self.waiting[place:place] = missing
        return len(missing)


class _Steps(terminal.ProgressDisplay):
    """Reports a run's steps now and then; its evaluations are in its files."""

    def __init__(self, steps: int, report: Callable[[News], None]):
        self._steps = steps
        self._report = report
        self._report_time = 0.0

    def step(self, steps_done: int, loss: float) -> None:
        if time.monotonic() - self._report_time > PAUSE:
            self._report_time = time.monotonic()
            self._report((steps_done, self._steps, loss))


class Cell:
    """The runs of one variant at one point in this process, one after the other.

    They share their programs, the ends of their rounds and the effective rate, as far
    as their settings allow (see `plan.Programs`), and the data with all other cells.

    Args:
        objects: what Python code passed in place of the configs' names.
        loader: makes plans, and loads the data.

    Attributes:
        programs: those of the last run; None before it.
    """

    def __init__(self, objects: Objects, loader: Loader):
        self.programs: Programs | None = None
        self._objects = objects
        self._loader = loader

    def run(
        self,
        config: RunConfig,
        folder: Path,
        report: Callable[[News], None],
        read_signal: stopping.ReadSignal,
    ) -> Summary:
        """Executes one run, and returns its summary.

        Args:
            config: the config of the run.
            folder: the folder of its files, which appears once all of them exist.
            report: function that is called with its news.
            read_signal: function that is called before each dispatch.

        Raises:
            StopRequested: it was asked to stop.
            OSError: a file cannot be written.
            Exception: the run cannot be made.
        """
        start_time = time.perf_counter()
        clear(folder)
        plan, data = self._loader.plan(config, self.programs, self._objects)
        self.programs = plan.programs
        run = make_run(plan, data)
        if run.rounds.untrained:
            report(
                "the results will be those of the initial model: "
                f"{run.rounds.untrained}"
            )
        with open_unfinished(folder) as temporary_folder:
            run_folder = Folder(run, temporary_folder, start_time)
            run_folder.record([*list_command(config), "--seed", str(config.seed)])
            # Only the last evaluation decides between trials: 18 others took 30 %
            # of a trial's time.
            outcome = run_folder.train(
                _Steps(run.config.steps, report),
                read_signal,
                evaluate_at_end_only=config.validation is not None,
            )
            if outcome.stopped:
                raise StopRequested
            summary = replace(
                summarize(run, outcome),
                correct=correct(run, outcome),
                total_seconds=round(run_folder.seconds, 3),
            )
            run_folder.write(summary)
        return summary


class Maker:
    """Makes the runs of a study in this process, and keeps one cell at a time.

    Attributes:
        loader: makes plans, and loads the data of all runs once.
        cell: that of the last run; None before it.
    """

    def __init__(self):
        self.loader = Loader()
        self.cell: Cell | None = None
        self._number: int | None = None

    def make(
        self,
        number: int,
        config: RunConfig,
        folder: Path,
        report: Callable[[News], None],
        read_signal: stopping.ReadSignal,
        objects: Objects = NO_OBJECTS,
    ) -> FinishedRun | Refused:
        """Executes one run; see `Cell.run`.

        Args:
            number: that of the run's cell.
            config, folder, report, read_signal: as for `Cell.run`.
            objects: those of the run's cell.

        Raises:
            StopRequested: it was asked to stop.
            OSError: a file cannot be written.
        """
        if self.cell is None or number != self._number:
            # The programs of other cells would take 30 MB each.
            jax.clear_caches()
            self.cell = Cell(objects, self.loader)
            self._number = number
        try:
            summary = self.cell.run(config, folder, report, read_signal)
        except (StopRequested, OSError):
            raise
        # The other runs continue: one failure must not stop hundreds of runs.
        except Exception as error:
            return describe_error(error)
        return FinishedRun(_format_results(summary))


def describe_error(error: Exception) -> Refused:
    """Returns an error in one line."""
    if isinstance(error, BadRequest):
        return Refused(in_one_line(error), is_request=True)
    return Refused(f"{type(error).__name__}: {in_one_line(error)}")


def clear(folder: Path) -> None:
    """Removes the files of an interrupted run, and folders that are then empty.

    A link to a folder of checkpoints is removed, but not what it points to.

    Raises:
        BadRequest: a command of `compare --list` is making it.
        OSError: a file cannot be removed.
    """
    if not folder.exists() or is_done(folder):
        return
    checkpoints = folder / CHECKPOINTS
    with lock.lock_folder(folder):
        inside = [] if checkpoints.is_symlink() else checkpoints.glob("*")
        for path in [*folder.iterdir(), *inside]:
            name = path.relative_to(folder).as_posix()
            if OF_RUN.fullmatch(name) and not path.is_dir():
                path.unlink()
        with suppress(OSError):  # it holds others, or there is none
            checkpoints.unlink() if checkpoints.is_symlink() else checkpoints.rmdir()
    with suppress(OSError):  # it holds something of the user's
        folder.rmdir()


@contextmanager
def open_unfinished(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder for a run's files, and renames it at the end."""
    # A folder gets its name once all its files exist, so no run is half made. Another
    # process may be making the same run, if the connection to it was lost.
    place = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        yield place
        clear(folder)
        _rename(place, folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _rename(place: Path, folder: Path) -> None:
    """Renames a run's folder, unless another process has made the same run."""
    try:
        place.replace(folder)
    except OSError:
        if is_done(folder):
            return
        if not folder.is_dir():
            raise
        # It holds other files of the user. The summary comes last: it marks a made run.
        for name in run_folder.NAMES:
            (place / name).replace(folder / name)
    files.sync_folder(folder.parent)


def _format_results(summary: Summary) -> str:
    """Returns the results of a run as text, without its training loss."""
    if summary.diverged:
        step = summary.diverged_at  # None if only the test loss was not finite
        return "diverged" if step is None else f"diverged at step {step}"
    measures = terminal.label_measures(summary.measures, summary.validation)
    figures: list[str] = []
    for name, value in measures.items():
        if value is None:
            continue
        # Only the first names its data, so that a line has room for its run's name.
        noun = name.partition(" ")[2] if figures else name
        figures.append(f"{noun} {terminal.figure(value)}")
    return ", ".join([*figures, f"{summary.total_seconds:.1f} s"])


class StudyProgress:
    """Shows the runs done, a line for each one under way, and the time left.

    Args:
        plan: the runs, which are counted here.
        bar: progress bar, disabled if there is no terminal.

    Attributes:
        plan: the runs.
        num_made: the number of runs made.
    """

    def __init__(self, plan: StudyQueue, bar: Progress):
        self.num_made = 0
        self.plan = plan
        self._bar = bar
        self._lines = dict[str, TaskID]()
        self._messages = set[str]()
        self._start_time = time.perf_counter()
        self._all = bar.add_task(
            "runs", total=plan.total, completed=plan.num_done, left=""
        )

    def begin(self, run: Missing) -> None:
        """Starts the line of a run, to be ended by `end` or `drop`."""
        self._lines[run.name] = self._bar.add_task(f"  {run.name}", total=1, left="")

    def show(self, run: Missing, news: News) -> None:
        """Shows news about a run; a warning is shown once for all seeds."""
        if isinstance(news, str):
            self.say_once(f"{run.set_name}: {news}")
        else:
            step, steps, loss = news
            text = f"step {step}/{steps}  loss {terminal.figure(loss)}"
            self._bar.update(self._lines[run.name], completed=step / steps, left=text)
        self._show_all()

    def end(self, run: Missing, outcome: FinishedRun | Refused) -> None:
        """Counts a run, ends its line, and shows its results or why it failed."""
        self.plan.count(run, outcome)
        self.drop(run)
        if isinstance(outcome, FinishedRun):
            self.num_made += 1
            count = f"{self.plan.num_done}/{self.plan.total}"
            text = f"run {count} {run.name}: {outcome.words}  {self._time_left()}"
            self.say(text.rstrip())
        else:
            self.say(f"failed: {run.name}: {outcome.line}")

    def drop(self, run: Missing) -> None:
        """Removes the line of a run, whether or not it starts again elsewhere."""
        self._bar.remove_task(self._lines.pop(run.name))
        self._show_all()

    def say(self, text: str) -> None:
        """Shows a text above the bars."""
        terminal.above(self._bar, text)

    def say_once(self, text: str) -> None:
        """Shows a text, unless it was shown before."""
        if text not in self._messages:
            self._messages.add(text)
            self.say(text)

    def _show_all(self) -> None:
        """Updates the overall progress from all lines."""
        shares = [x.completed for x in self._bar.tasks if x.id in self._lines.values()]
        if len(shares) > 1:
            description = (
                f"{self.plan.num_done}/{self.plan.total} runs, {len(shares)} running"
            )
        else:
            description = f"{self.plan.num_done}/{self.plan.total} runs"
        self._bar.update(
            self._all,
            completed=self.plan.num_done + sum(shares),
            description=description,
            left=self._time_left(sum(shares)),
        )

    def _time_left(self, parts: float = 0.0) -> str:
        """Returns the time left in words; `parts` is what is done of runs under way."""
        made_runs = self.num_made + parts
        missing_runs = self.plan.missing - parts
        # The first runs take much longer, because their steps are compiled.
        if made_runs < max(0.2, (made_runs + missing_runs) / 20) or missing_runs <= 0:
            return ""
        seconds = (time.perf_counter() - self._start_time) / made_runs * missing_runs
        return f"about {terminal.duration(seconds, digits=2)} left"


@contextmanager
def progress(plan: StudyQueue) -> Iterator[StudyProgress]:
    """Shows bars if stderr is a terminal, otherwise a line for each run."""
    with terminal.bar(terminal.elapsed_time(), "{task.fields[left]}") as bar:
        yield StudyProgress(plan, bar)


def make_all(
    maker: Maker, bar: StudyProgress, read_signal: stopping.ReadSignal
) -> None:
    """Makes all runs of a plan in this process, one after the other."""
    number = None
    while True:
        run = bar.plan.take(number)
        if run is None:
            return
        number = run.number
        # Before the first run nothing can be lost: the signal ends the process.
        if bar.num_made and read_signal():
            raise StopRequested
        bar.begin(run)
        outcome = maker.make(
            number,
            run.config,
            run.folder,
            partial(bar.show, run),
            read_signal,
            run.runs.variant.objects,
        )
        bar.end(run, outcome)


@contextmanager
def clean_remains(out: Path) -> Iterator[None]:
    """Removes the remains of runs whose process was killed, now or earlier."""
    try:
        yield
    finally:
        for kind in ("runs", "tuning"):
            for folder in out.glob(f"{kind}/*/**/.seed-*"):
                if re.fullmatch(r"\.seed-\d+-[0-9a-f]{8}", folder.name):
                    shutil.rmtree(folder, ignore_errors=True)
