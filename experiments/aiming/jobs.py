"""Compiles all programs that were asked for, and reports what was found."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from experiments import exit_codes
from experiments.aiming import targets
from experiments.aiming.compiling import processes
from experiments.aiming.config import AimConfig, Job
from experiments.aiming.report import content, files, formats
from experiments.aiming.report.files import Known
from experiments.aiming.report.records import Result, results
from experiments.cli import terminal
from experiments.cli.errors import BadRequest


def run(config: AimConfig, argv: list[str]) -> int:
    """Compiles one program after the other, and shows and writes what was found.

    Args:
        config: checked.
        argv: of the command, for its files.

    Returns:
        The exit code: 0, or 1 where a program could not be compiled.

    Raises:
        BadRequest: every program of the user's is refused: the first one's reason; a
            missing compiler; a file that cannot be read or written.
    """
    found: tuple[Result, ...] = ()
    known = files.known(config)
    for answers in _answers(config, known):
        found = results(config, answers)
        if any("error" not in x for x in answers):
            files.write_json(config, argv, found, known)
    terminal.show(formats.text(content.page(config, argv, found)))
    files.write_page(config, argv, found)
    return exit_codes.FAILED if any(not x.is_done for x in found) else 0


def _answers(config: AimConfig, known: Known) -> Iterator[list[dict[str, Any]]]:
    """Yields after each compilation, and at the end, the answers in the jobs' order."""
    answers, forms = [], {}
    for job in config.jobs:
        if files.key_of(job) not in known:
            targets.check_compiler(job.target)
    asked = len(config.variants)
    with _progress(len(config.jobs)) as bar:
        for number, job in enumerate(config.jobs):
            bar.begin(job)
            answer = known.get(files.key_of(job))
            if answer is None:
                key = _data_of(job)
                answer = processes.answer(job, forms.get(key), config.timeout)
                forms[key] = answer.pop("form", forms.get(key))
            answers.append(answer)
            if number + 1 == asked and all("error" in x for x in answers):
                raise BadRequest(answers[0]["error"])
            bar.end(job, answer)
            # What is known stands in its file already.
            if files.key_of(job) not in known or number + 1 == len(config.jobs):
                yield answers


def _data_of(job: Job) -> tuple[Any, ...]:
    """Returns what the shapes of a job's data follow from."""
    c = job.config
    return c.task, *sorted(c.task_arguments.items()), c.validation, c.data_dir


class _Bar:
    """The programs done, and the one that is being compiled."""

    def __init__(self, bar: Progress, total: int):
        self._bar, self._total, self._done = bar, total, 0
        self._task = bar.add_task("", total=total)

    def begin(self, job: Job) -> None:
        """Shows the program that is being compiled."""
        self._bar.update(self._task, description=f"compiling {name_of(job)}")

    def end(self, job: Job, answer: dict[str, Any]) -> None:
        """Shows in a line how it went."""
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        how = content.outcome(answer)
        terminal.above(self._bar, f"{self._done}/{self._total} {name_of(job)}: {how}")


def name_of(job: Job) -> str:
    """Returns a job's name in a line."""
    slices = f" × {job.target.slices}" if job.target.slices > 1 else ""
    return f"{job.variant.label} for {job.target.text}{slices}"


@contextmanager
def _progress(total: int) -> Iterator[_Bar]:
    """Shows a bar where stderr is a terminal, a line for each program elsewhere."""
    columns = ("{task.description}", BarColumn(), TimeElapsedColumn())
    console, is_hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:
        yield _Bar(bar, total)
