"""Makes the runs of a study in this process, and shows their progress."""

import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.progress import BarColumn, Progress, TaskID, TimeElapsedColumn

from experiments.checkpoint import lock
from experiments.cli import stopping, terminal
from experiments.cli.errors import BadRequest, in_one_line
from experiments.one_run import Folder, trained
from experiments.study.queue import Made, Plan, Refused
from experiments.study.runs import Loader, command_of, is_done
from experiments.training import files, run_folder
from experiments.training.config import RunConfig
from experiments.training.plan import Programs
from experiments.training.prepare import make_run

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


class Stopped(Exception):
    """The user asked to stop; the current run is discarded."""


class _Steps:
    """Reports a run's steps now and then; its evaluations are in its files."""

    def __init__(self, steps: int, report: Callable[[News], None]):
        self._steps, self._report, self._last = steps, report, 0.0

    def step(self, done: int, loss: float) -> None:
        if time.monotonic() - self._last > PAUSE:
            self._last = time.monotonic()
            self._report((done, self._steps, loss))

    def line(self, text: str) -> None: ...


class Maker:
    """Makes runs one after the other, reusing the programs of the last if possible.

    Args:
        loader: makes plans, and keeps their data.
    """

    def __init__(self, loader: Loader):
        self._loader = loader
        self._programs: Programs | None = None

    def make(
        self,
        config: RunConfig,
        folder: Path,
        report: Callable[[News], None],
        asked_to_stop: stopping.Stopped,
    ) -> Made | Refused:
        """Makes one run.

        Args:
            config: the config of the run.
            folder: the folder of its files, which appears once all of them exist.
            report: function that is called with its news.
            asked_to_stop: function that is called before each dispatch.

        Raises:
            Stopped: it was asked to stop.
            OSError: a file cannot be written.
        """
        started = time.perf_counter()
        try:
            clear(folder)
            plan, data = self._loader.plan(config, self._programs)
            self._programs = plan.programs
            run = make_run(plan, data)
            if why := run.rounds.untrained:
                start = "the results will be those of the initial model"
                report(f"{start}: {why}")
            with unfinished(folder) as place:
                own = Folder(run, place, started)
                own.record([*command_of(config), "--seed", str(config.seed)])
                shown = _Steps(run.config.steps, report)
                outcome, summary = trained(own, shown, asked_to_stop)
                if outcome.stopped:
                    raise Stopped
                own.close(summary)
        except (Stopped, OSError):
            raise
        # The other runs continue: one failure must not stop hundreds of runs.
        except Exception as error:
            return described(error)
        return Made(_results(summary))


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
    with lock.held(folder):
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


def _results(summary: dict[str, Any]) -> str:
    """Returns the results of a run as text, without its training loss."""
    if summary["diverged"]:
        return f"diverged at step {summary['diverged_at']}"
    shown = terminal.measured(summary, summary["validation"])
    loss, *others = [x for x in shown if x != "train loss" and shown[x] is not None]
    # Only the first names its data, so that a line has room for its run's name.
    names = {loss: loss, **{name: name.partition(" ")[2] for name in others}}
    figures = [f"{names[x]} {terminal.figure(shown[x])}" for x in names]
    return ", ".join([*figures, f"{summary['total_seconds']:.1f} s"])


class StudyProgress:
    """Shows the runs done, a line for each one under way, and the time left.

    Args:
        total: number of runs.
        done: number of runs that exist already.
        bar: progress bar, disabled if there is no terminal.
    """

    def __init__(self, total: int, done: int, bar: Progress):
        self.total, self.done, self.made = total, done, 0
        self._bar, self._names = bar, dict[TaskID, str]()
        self._started = time.perf_counter()
        self._said = set[str]()
        self._task = bar.add_task("runs", total=total, completed=done, left="")

    def begin(self, name: str) -> TaskID:
        """Starts the line of a run, to be ended by `end` or `drop`."""
        line = self._bar.add_task(f"  {name}", total=1, left="")
        self._names[line] = name
        return line

    def show(self, line: TaskID, news: News) -> None:
        """Shows news about a run; a warning is shown once for all seeds."""
        if isinstance(news, str):
            self.say_once(f"{self._names[line].rpartition(', seed ')[0]}: {news}")
        else:
            done, steps, loss = news
            text = f"step {done}/{steps}  loss {terminal.figure(loss)}"
            self._bar.update(line, completed=done / steps, left=text)
        self._show_all()

    def end(self, line: TaskID, outcome: Made | Refused) -> None:
        """Ends the line of a run, and shows its results or why it failed."""
        name = self._names[line]
        if isinstance(outcome, Made):
            self.done, self.made = self.done + 1, self.made + 1
            self.drop(line)
            at, left = f"{self.done}/{self.total}", self._left(self.done)
            self.say(f"run {at} {name}: {outcome.words}  {left}".rstrip())
        else:
            self.drop(line)
            self.say(f"failed: {name}: {outcome.line}")

    def drop(self, line: TaskID) -> None:
        """Removes the line of a run, whether or not it starts again elsewhere."""
        del self._names[line]
        self._bar.remove_task(line)
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
        parts = [x.completed for x in self._bar.tasks if x.id in self._names]
        at, text = self.done + sum(parts), f"{self.done}/{self.total} runs"
        if len(parts) > 1:
            text += f", {len(parts)} running"
        left = self._left(at)
        self._bar.update(self._task, completed=at, description=text, left=left)

    def _left(self, at: float) -> str:
        """Returns the time left in words; `at` is the runs done, with fractions."""
        made, missing = self.made + at - self.done, self.total - at
        # The first steps take much longer, because they are compiled.
        if made < 0.2 or missing <= 0:
            return ""
        seconds = (time.perf_counter() - self._started) / made * missing
        return f"about {terminal.duration(seconds, digits=2)} left"


@contextmanager
def progress(total: int, done: int) -> Iterator[StudyProgress]:
    """Shows bars if stderr is a terminal, otherwise a line for each run."""
    left = "{task.fields[left]}"
    columns = "{task.description}", BarColumn(), TimeElapsedColumn(), left
    with terminal.bar(*columns) as bar:
        yield StudyProgress(total, done, bar)


def here(
    plan: Plan, loader: Loader, bar: StudyProgress, asked_to_stop: stopping.Stopped
) -> None:
    """Makes all runs of a plan in this process, one after the other."""
    maker, number = Maker(loader), 0
    while (run := plan.take(number)) is not None:
        if run.number != number:
            # Otherwise the programs of all variants stay in memory, 30 MB each.
            maker, number = Maker(loader), run.number
            jax.clear_caches()
        # Before the first run nothing can be lost: the signal ends the process.
        if bar.made and asked_to_stop():
            raise Stopped
        line = bar.begin(run.name)
        show = partial(bar.show, line)
        outcome = maker.make(run.config, run.folder, show, asked_to_stop)
        bar.end(line, outcome)
        plan.ended(run, outcome)


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
