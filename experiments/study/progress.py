"""How a study shows where it is."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from experiments.cli import terminal
from experiments.study.analysis import formatting


class StudyProgress:
    """Runs done, and the time left by those done so far: a `screen.Report` of each run.

    Args:
        total: runs that there are.
        done: of them, those that are there already.
        bar: on a terminal.
    """

    def __init__(self, total: int, done: int, bar: Progress | None):
        self.total, self.done, self.made = total, done, 0
        self.started = time.perf_counter()
        self.name, self.steps, self.bar = "", 1, bar
        self.task: TaskID | None = None
        if bar is not None:
            self.task = bar.add_task("", total=total, completed=done, left="")

    def begin(self, name: str, steps: int) -> None:
        """A run begins."""
        self.name, self.steps = name, steps
        self.step(0)

    def step(self, done: int) -> None:
        """So many local steps of the run are done."""
        if self.bar is not None and self.task is not None:
            at = done / self.steps
            self.bar.update(
                self.task,
                completed=self.done + at,
                description=f"run {min(self.done + 1, self.total)}/{self.total} "
                f"{self.name}",
                left=self.left(at),
            )

    def line(self, text: str) -> None:
        """An evaluation of the run: the study shows its end alone."""

    def end(self, text: str) -> None:
        """The run is done."""
        self.done, self.made = self.done + 1, self.made + 1
        left = f"  {left}" if (left := self.left()) else ""
        self.say(f"run {self.done}/{self.total} {self.name}: {text}{left}")

    def say(self, text: str) -> None:
        """Something to read."""
        if self.bar is None:
            terminal.say(text)
        else:
            terminal.above(self.bar, text)

    def left(self, at: float = 0.0) -> str:
        """The time left, in words."""
        made, missing = self.made + at, self.total - self.done - at
        if made < 0.2 or missing <= 0:
            return ""
        seconds = (time.perf_counter() - self.started) / made * missing
        return f"about {formatting.duration(seconds, digits=2)} left"


@contextmanager
def progress(total: int, done: int) -> Iterator[StudyProgress]:
    """A bar where stderr is a terminal, a line a run elsewhere."""
    if not sys.stderr.isatty():
        yield StudyProgress(total, done, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield StudyProgress(total, done, bar)
