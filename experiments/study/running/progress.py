"""The display of a study's runs, one or several at a time."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from experiments.cli import terminal
from experiments.cli.terminal import duration
from experiments.study.running.maker import Made, News, Refused, Stepped


class StudyProgress:
    """Shows the runs done, those under way, and the time left.

    Args:
        total: number of runs.
        done: number of runs that exist already.
        bar: progress bar, disabled if there is no terminal.
    """

    def __init__(self, total: int, done: int, bar: Progress):
        self.total, self.done, self.made = total, done, 0
        self.bar, self.lines = bar, list[RunLine]()
        self._started = time.perf_counter()
        self._said = set[str]()
        self._task = bar.add_task("runs", total=total, completed=done, left="")

    def begin(self, name: str) -> "RunLine":
        """Starts the line of a run."""
        self.lines.append(RunLine(self, name))
        return self.lines[-1]

    def say(self, text: str) -> None:
        """Shows a line."""
        terminal.above(self.bar, text)

    def say_once(self, text: str) -> None:
        """Shows a line, unless it was shown before."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def show(self) -> None:
        """Updates the overall progress from all lines."""
        at = self.done + sum(line.part for line in self.lines)
        text = f"{self.done}/{self.total} runs"
        if len(self.lines) > 1:
            text += f", {len(self.lines)} running"
        self.bar.update(self._task, completed=at, description=text, left=self.left(at))

    def left(self, at: float) -> str:
        """Returns the time left in words; `at` is the runs done, with fractions."""
        made, missing = self.made + at - self.done, self.total - at
        # The first steps take much longer, because they are compiled.
        if made < 0.2 or missing <= 0:
            return ""
        seconds = (time.perf_counter() - self._started) / made * missing
        return f"about {duration(seconds, digits=2)} left"


class RunLine:
    """The line of one run, from its start to `end` or `drop`.

    Attributes:
        part: the fraction of the run that is done, from 0 to 1.
    """

    def __init__(self, study: StudyProgress, name: str):
        self.part = 0.0
        self._study, self._name = study, name
        self._task = study.bar.add_task(f"  {name}", total=1, left="")

    def show(self, news: News) -> None:
        """Shows news about the run; a warning is shown once for all seeds."""
        match news:
            case Stepped(done, steps, loss):
                self.part = done / steps
                text = f"step {done}/{steps}  loss {terminal.figure(loss)}"
                self._study.bar.update(self._task, completed=self.part, left=text)
            case text:
                cell = self._name.rpartition(", seed ")[0]
                self._study.say_once(f"{cell}: {text}")
        self._study.show()

    def end(self, outcome: Made | Refused) -> None:
        """Ends the run, and shows its results or why it failed."""
        study = self._study
        match outcome:
            case Made(words):
                study.done, study.made = study.done + 1, study.made + 1
                self.drop()
                at, left = f"{study.done}/{study.total}", study.left(study.done)
                study.say(f"run {at} {self._name}: {words}  {left}".rstrip())
            case Refused(why):
                self.drop()
                study.say(f"failed: {self._name}: {why}")

    def drop(self) -> None:
        """Removes the line, whether or not its run starts again elsewhere."""
        self._study.lines.remove(self)
        self._study.bar.remove_task(self._task)
        self._study.show()


@contextmanager
def progress(total: int, done: int) -> Iterator[StudyProgress]:
    """Shows bars if stderr is a terminal, otherwise a line for each run."""
    columns = ("{task.description}", BarColumn(), TimeElapsedColumn())
    columns += ("{task.fields[left]}",)
    console, is_hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:
        yield StudyProgress(total, done, bar)
