"""Compiles all requested programs, and reports the results."""

from collections.abc import Iterator
from typing import Any

from rich.progress import BarColumn, TimeElapsedColumn

from experiments.aiming import targets
from experiments.aiming.compiling import processes
from experiments.aiming.config import AimConfig
from experiments.aiming.report import files, tables
from experiments.aiming.report.files import Known
from experiments.aiming.report.records import Result, outcome, results
from experiments.cli import stopping, terminal
from experiments.cli.errors import BadRequest


def run(config: AimConfig, argv: list[str]) -> int:
    """Compiles one program after the other, and shows and writes the results.

    Args:
        config: the checked config.
        argv: flags of the command, to record in its files.

    Returns:
        The exit code: 0, or 1 where a program could not be compiled.

    Raises:
        BadRequest: all requested programs are refused (with the reason of the first),
            a compiler is missing, or a file cannot be read or written (`Unwritten`).
    """
    found: tuple[Result, ...] = ()
    known = files.known(config)
    for answers in _answers(config, known):
        found = results(config, answers)
        if any("error" not in x for x in answers):
            files.write_json(config, argv, found, known)
    terminal.show(tables.text(config, found))
    files.write_page(config, argv, found)
    return stopping.FAILED if any(not x.is_done for x in found) else 0


def _answers(config: AimConfig, known: Known) -> Iterator[list[dict[str, Any]]]:
    """Yields the answers in the order of the jobs, after each compilation.

    Shows a bar if stderr is a terminal, otherwise a line for each program.
    """
    answers, jobs = [], config.jobs
    for job in jobs:
        if files.key_of(job) not in known:
            targets.check_compiler(job.target)
    columns = ("{task.description}", BarColumn(), TimeElapsedColumn())
    with terminal.bar(*columns) as bar:
        task = bar.add_task("", total=len(jobs))
        for number, job in enumerate(jobs, 1):
            name = f"{job.variant.label} for {job.target.shown}"
            bar.update(task, description=f"compiling {name}")
            answer = known.get(files.key_of(job))
            is_new = answer is None
            if answer is None:
                answer = processes.answer(job, config.timeout)
            answers.append(answer)
            if number == len(config.variants) and all("error" in x for x in answers):
                raise BadRequest(answers[0]["error"])
            bar.update(task, completed=number)
            terminal.above(bar, f"{number}/{len(jobs)} {name}: {outcome(answer)}")
            # Reused answers are in their file already.
            if is_new or number == len(jobs):
                yield answers
