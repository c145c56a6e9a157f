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
    def cell(self) -> str:
        """The name of all seeds, for the user."""
        runs = self.runs
        trial = runs.trial if runs.is_trial else ""
        return " ".join(x for x in (runs.variant.label, runs.point, trial) if x)

    @property
    def name(self) -> str:
        """The name of the run, for the user."""
        return f"{self.cell}, seed {self.seed}"

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
        total: the number of all runs.
        done: the number of runs that exist.
        failures: the runs that failed, and why.
        found: the run sets to report, with the chosen values; None while trials run.
        waiting: the missing runs that are known so far and that no job makes.
    """

    def __init__(
        self,
        planned: Sequence[RunSet],
        choose: Callable[[RunSet], RunSet | None],
        further: Callable[[RunSet], Iterator[list[RunSet]]] = lambda made: iter(()),
    ):
        self.planned = [*planned]
        self._choose = choose
        self._further = [further(runs) for runs in planned]
        sets = [x for runs in planned for x in (runs, *runs.trials)]
        self.total = sum(len(x.seeds) for x in sets)
        self.done = 0
        self.failures = list[tuple[Missing, Refused]]()
        self.found: list[RunSet | None] = [None] * len(planned)
        self.waiting = list[Missing]()
        self._taken = Counter[int]()  # runs in progress, by number
        self._trials = Counter[int]()  # trials left, by number
        # All trials first: the final runs then fill the gaps at the end.
        for number, runs in enumerate(planned):
            self._trials[number] = self._add(number, runs.trials, len(self.waiting))
        for number in range(len(planned)):
            if not self._trials[number]:
                self._go_on(number, len(self.waiting))

    @property
    def missing(self) -> int:
        """The number of runs that do not exist yet."""
        return self.total - self.done

    @property
    def is_over(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.waiting and not self._taken.total()

    def take(self, last: int | None = None) -> Missing | None:
        """Returns the run that a free job makes next; None while there is none.

        Args:
            last: the number of the job's last run.
        """
        if not self.waiting:
            return None
        # Programs are compiled by as few jobs as possible: a job stays with its number,
        # or begins one that no other job has.
        run = min(self.waiting, key=lambda x: (x.number != last, self._taken[x.number]))
        self.waiting.remove(run)
        self._taken[run.number] += 1
        return run

    def ended(self, run: Missing, outcome: FinishedRun | Refused) -> None:
        """Counts a run, which was made or failed."""
        self._taken[run.number] -= 1
        if isinstance(outcome, FinishedRun):
            self.done += 1
        else:
            self.failures.append((run, outcome))
        self._trials[run.number] -= 1
        if self._trials[run.number] == 0:  # final runs count on, below it
            # First of all that wait: their variant has been under way the longest.
            self._go_on(run.number, 0)

    def give_back(self, run: Missing) -> None:
        """Takes back a run that a job has not made."""
        self._taken[run.number] -= 1
        self.waiting.insert(0, run)

    def _go_on(self, number: int, place: int) -> None:
        """Adds further trials, or, without any, the runs with the chosen values."""
        planned = self.planned[number]
        for trials in self._further[number]:
            planned = planned._replace(trials=join_trials(planned.trials, trials))
            self.planned[number] = planned
            self.total += sum(len(x.seeds) for x in trials)
            self._trials[number] = self._add(number, trials, place)
            if self._trials[number]:
                return
        runs = self.found[number] = self._choose(planned)
        if runs is not None:
            self._add(number, [runs], place)
            return
        why = Refused("all of its trials failed, so no values can be chosen", True)
        self.failures.append((Missing(number, planned, planned.seeds[0]), why))

    def _add(self, number: int, sets: Sequence[RunSet], place: int) -> int:
        """Adds the missing runs of some run sets; returns how many there are."""
        missing = [Missing(number, runs, x) for runs in sets for x in runs.missing()]
        for run in missing:
            why = damage(run.folder)
            if why:
                terminal.say(f"{why}: the run is repeated")
        self.done += sum(len(runs.seeds) for runs in sets) - len(missing)
        self.waiting[place:place] = missing
        return len(missing)


class _Steps(terminal.Report):
    """Reports a run's steps now and then; its evaluations are in its files."""

    def __init__(self, steps: int, report: Callable[[News], None]):
        self._steps = steps
        self._report = report
        self._last = 0.0

    def step(self, steps_done: int, loss: float) -> None:
        if time.monotonic() - self._last > PAUSE:
            self._last = time.monotonic()
            self._report((steps_done, self._steps, loss))


class Maker(Loader):
    """Makes runs one after the other, reusing the programs of the last if possible.

    Attributes:
        programs: those of the last run; None if the next shares none.
    """

    def __init__(self):
        super().__init__()
        self.programs: Programs | None = None
        self._number = 0

    def turn_to(self, number: int) -> None:
        """Forgets the programs of all run sets but this, of 30 MB each."""
        if number != self._number:
            self._number = number
            self.programs = None
            jax.clear_caches()

    def make(
        self,
        config: RunConfig,
        folder: Path,
        report: Callable[[News], None],
        asked_to_stop: stopping.ReadSignal,
        objects: Objects = NO_OBJECTS,
    ) -> FinishedRun | Refused:
        """Executes one run.

        Args:
            config: the config of the run.
            folder: the folder of its files, which appears once all of them exist.
            report: function that is called with its news.
            asked_to_stop: function that is called before each dispatch.
            objects: what Python code passed in place of the config's names.

        Raises:
            StopRequested: it was asked to stop.
            OSError: a file cannot be written.
        """
        started = time.perf_counter()
        try:
            clear(folder)
            plan, data = self.plan(config, self.programs, objects)
            self.programs = plan.programs
            run = make_run(plan, data)
            why = run.rounds.untrained
            if why:
                report(f"the results will be those of the initial model: {why}")
            with unfinished(folder) as place:
                own = Folder(run, place, started)
                own.record([*list_command(config), "--seed", str(config.seed)])
                shown = _Steps(run.config.steps, report)
                # Only the last evaluation decides between trials: 18 others took 30 %
                # of a trial's time.
                is_trial = config.validation is not None
                outcome = own.train(shown, asked_to_stop, evaluate_at_end_only=is_trial)
                if outcome.stopped:
                    raise StopRequested
                summary = replace(
                    summarize(run, outcome),
                    correct=correct(run, outcome),
                    total_seconds=round(own.seconds, 3),
                )
                own.write(summary)
        except (StopRequested, OSError):
            raise
        # The other runs continue: one failure must not stop hundreds of runs.
        except Exception as error:
            return described(error)
        return FinishedRun(_results(summary))


def described(error: Exception) -> Refused:
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
def unfinished(folder: Path) -> Iterator[Path]:
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


def _results(summary: Summary) -> str:
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
        made: the number of runs made.
    """

    def __init__(self, plan: StudyQueue, bar: Progress):
        self.made = 0
        self.plan = plan
        self._bar = bar
        self._lines = dict[str, TaskID]()
        self._said = set[str]()
        self._started = time.perf_counter()
        self._all = bar.add_task("runs", total=plan.total, completed=plan.done, left="")

    def begin(self, run: Missing) -> None:
        """Starts the line of a run, to be ended by `end` or `drop`."""
        self._lines[run.name] = self._bar.add_task(f"  {run.name}", total=1, left="")

    def show(self, run: Missing, news: News) -> None:
        """Shows news about a run; a warning is shown once for all seeds."""
        if isinstance(news, str):
            self.say_once(f"{run.cell}: {news}")
        else:
            done, steps, loss = news
            text = f"step {done}/{steps}  loss {terminal.figure(loss)}"
            self._bar.update(self._lines[run.name], completed=done / steps, left=text)
        self._show_all()

    def end(self, run: Missing, outcome: FinishedRun | Refused) -> None:
        """Counts a run, ends its line, and shows its results or why it failed."""
        self.plan.ended(run, outcome)
        self.drop(run)
        if isinstance(outcome, FinishedRun):
            self.made += 1
            at = f"{self.plan.done}/{self.plan.total}"
            left = self._left()
            self.say(f"run {at} {run.name}: {outcome.words}  {left}".rstrip())
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
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def _show_all(self) -> None:
        """Updates the overall progress from all lines."""
        shares = [x.completed for x in self._bar.tasks if x.id in self._lines.values()]
        if len(shares) > 1:
            description = (
                f"{self.plan.done}/{self.plan.total} runs, {len(shares)} running"
            )
        else:
            description = f"{self.plan.done}/{self.plan.total} runs"
        self._bar.update(
            self._all,
            completed=self.plan.done + sum(shares),
            description=description,
            left=self._left(sum(shares)),
        )

    def _left(self, parts: float = 0.0) -> str:
        """Returns the time left in words; `parts` is what is done of runs under way."""
        made = self.made + parts
        missing = self.plan.missing - parts
        # The first runs take much longer, because their steps are compiled.
        if made < max(0.2, (made + missing) / 20) or missing <= 0:
            return ""
        seconds = (time.perf_counter() - self._started) / made * missing
        return f"about {terminal.duration(seconds, digits=2)} left"


@contextmanager
def progress(plan: StudyQueue) -> Iterator[StudyProgress]:
    """Shows bars if stderr is a terminal, otherwise a line for each run."""
    with terminal.bar(terminal.elapsed_time(), "{task.fields[left]}") as bar:
        yield StudyProgress(plan, bar)


def here(maker: Maker, bar: StudyProgress, asked_to_stop: stopping.ReadSignal) -> None:
    """Makes all runs of a plan in this process, one after the other."""
    number = 0
    while (run := bar.plan.take(number)) is not None:
        number = run.number
        maker.turn_to(number)
        # Before the first run nothing can be lost: the signal ends the process.
        if bar.made and asked_to_stop():
            raise StopRequested
        bar.begin(run)
        show = partial(bar.show, run)
        objects = run.runs.variant.objects
        outcome = maker.make(run.config, run.folder, show, asked_to_stop, objects)
        bar.end(run, outcome)


@contextmanager
def cleaned(out: Path) -> Iterator[None]:
    """Removes the remains of runs whose process was killed, now or earlier."""
    try:
        yield
    finally:
        found = *out.glob("runs/*/**/.seed-*"), *out.glob("tuning/*/**/.seed-*")
        for unfinished in found:
            if re.fullmatch(r"\.seed-\d+-[0-9a-f]{8}", unfinished.name):
                shutil.rmtree(unfinished, ignore_errors=True)
