"""Compiles all programs that were asked for, and reports what was found."""

from collections.abc import Iterator
from typing import Any

from rich.progress import BarColumn, TimeElapsedColumn

from experiments import exit_codes
from experiments.aiming import targets
from experiments.aiming.compiling import processes
from experiments.aiming.config import AimConfig
from experiments.aiming.report import content, files, formats
from experiments.aiming.report.files import Known
from experiments.aiming.report.records import Result, outcome, results
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
    page = content.page(config, argv, found)
    terminal.show(formats.text(page))
    files.write_page(config, page)
    return exit_codes.FAILED if any(not x.is_done for x in found) else 0


def _answers(config: AimConfig, known: Known) -> Iterator[list[dict[str, Any]]]:
    """Yields after each compilation, and at the end, the answers in the jobs' order.

    It shows a bar where stderr is a terminal, a line for each program elsewhere.
    """
    answers, forms, jobs = [], {}, config.jobs
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
                c = job.config  # from which the shapes of the data follow
                data = c.task, *sorted(c.task_arguments.items()), c.validation
                key = *data, c.data_dir
                answer = processes.answer(job, forms.get(key), config.timeout)
                forms[key] = answer.pop("form", forms.get(key))
            answers.append(answer)
            if number == len(config.variants) and all("error" in x for x in answers):
                raise BadRequest(answers[0]["error"])
            bar.update(task, completed=number)
            terminal.above(bar, f"{number}/{len(jobs)} {name}: {outcome(answer)}")
            # What is known stands in its file already.
            if is_new or number == len(jobs):
                yield answers
